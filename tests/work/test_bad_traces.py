"""Every kind of broken trace is refused with the file, the line, the field and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiseki.work.arrivals import poisson
from kaiseki.work.traces.errors import TraceError
from kaiseki.work.traces.lines import MAX_LINE_BYTES
from kaiseki.work.traces.opening import Format, Timing, load

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,10,2,12,API log\n"
MOON = '{"timestamp": 5, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
SHORT = '{"timestamp": 6, "input_length": 6, "output_length": 5, "hash_ids": '
TIME = "2023-11-16 18:15:47"


def refused(path: Path, format: Format | str = "auto") -> TraceError:
    with pytest.raises(TraceError) as caught:
        list(load(path, format, timing=Timing(poisson(1.0))))  # type: ignore[arg-type]
    error = caught.value
    assert str(error).startswith(f"{path}, line {error.line}: {error.field}: ")
    assert repr(error.value) in str(error) and error.allowed in str(error)
    return error


@pytest.mark.parametrize(
    ("text", "line", "field", "value"),
    [
        (AZURE + f"{TIME},nan,5", 3, "ContextTokens", "nan"),
        (AZURE + f"{TIME},-1,5", 3, "ContextTokens", "-1"),
        (AZURE + f"{TIME},1.5,5", 3, "ContextTokens", "1.5"),
        (AZURE + f"{TIME},,5", 3, "ContextTokens", ""),
        (AZURE + f"{TIME},0,5", 3, "ContextTokens", "0"),
        (AZURE + f"{TIME},٣,5", 3, "ContextTokens", "٣"),
        (AZURE + f"{TIME},5,1000000000", 3, "GeneratedTokens", "1000000000"),
        (AZURE + f"{TIME},{'9' * 6000},5", 3, "ContextTokens", "9" * 80 + "…"),
        (AZURE + "2023-11-16 18:15:46.6805899,5,5", 3, "TIMESTAMP", "2023-11-16 18:15:46.6805899"),
        (AZURE + "2023-11-16 18:15:47.1234567890,5,5", 3, "TIMESTAMP", "2023-11-16 18:15:47.1234567890"),
        (AZURE + "2023-13-16 18:15:47,5,5", 3, "TIMESTAMP", "2023-13-16 18:15:47"),
        (AZURE + "soon,5,5", 3, "TIMESTAMP", "soon"),
        (AZURE + f"{TIME},5", 3, "row", f"{TIME},5"),
        (AZURE + f'{TIME},"5,5', 3, "row", f'{TIME},"5,5'),
        ("TIMESTAMP,ContextTokens\n", 1, "header", "TIMESTAMP,ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", 1, "file", "no requests"),
        (BURST + "nan,m,10,2,12,x", 3, "Timestamp", "nan"),
        (BURST + "inf,m,10,2,12,x", 3, "Timestamp", "inf"),
        (BURST + "-3,m,10,2,12,x", 3, "Timestamp", "-3"),
        (BURST + "1e30,m,10,2,12,x", 3, "Timestamp", "1e30"),
        (BURST + "4,m,10,2,12,x", 3, "Timestamp", "4"),
        (BURST + "6,m,10,-2,12,x", 3, "Response tokens", "-2"),
        (BURST + "6,m,0,2,12,x", 3, "Request tokens", "0"),
        ("Timestamp,Request tokens\n5,5\n", 1, "header", "Timestamp,Request tokens"),
        ("Timestamp,Request tokens,Response tokens\n5,5,0\n", 1, "file", "no requests"),
        (MOON + '{"timestamp": 6, "input_length": 60', 2, "line", '{"timestamp": 6, "input_length": 60'),
        (MOON + "7", 2, "line", "7"),
        (MOON + '{"timestamp": 6, "output_length": 5}', 2, "input_length", "nothing"),
        (MOON + '{"timestamp": NaN, "input_length": 6, "output_length": 5}', 2, "timestamp", "nan"),
        (MOON + '{"timestamp": -6, "input_length": 6, "output_length": 5}', 2, "timestamp", "-6"),
        (MOON + '{"timestamp": true, "input_length": 6, "output_length": 5}', 2, "timestamp", "True"),
        (MOON + '{"timestamp": 4, "input_length": 6, "output_length": 5}', 2, "timestamp", "4"),
        (MOON + '{"timestamp": 6, "input_length": NaN, "output_length": 5}', 2, "input_length", "nan"),
        (MOON + '{"timestamp": 6, "input_length": 6.0, "output_length": 5}', 2, "input_length", "6.0"),
        (MOON + MOON.replace("600", "1000000000"), 2, "input_length", "1000000000"),
        (MOON + '{"timestamp": 6, "input_length": 6, "output_length": null}', 2, "output_length", "None"),
        (MOON + SHORT + '[1, 2]}', 2, "hash_ids", "2 ids"),
        (MOON + SHORT + '"1"}', 2, "hash_ids", "1"),
        (MOON + SHORT + '[-1]}', 2, "hash_ids", "-1"),
        (MOON + SHORT + '[true]}', 2, "hash_ids", "True"),
        ("[" * 100_000, 1, "conversation", "[" * 80 + "…"),
        ("[]", 1, "file", "no answers"),
        ('[\n{"conversations": []}\n]', 1, "file", "no answers"),
        ('[\n{"conversations": []},\n7]', 3, "conversations", "None"),
        ('[\n{"conversations": [7]}]', 2, "value", "None"),
        ('[{"conversations": [{"from": "human", "value": null}]}]', 1, "value", "None"),
        ('[{"conversations": [{"from": "cat", "value": "miaow"}]}]', 1, "from", "cat"),
        ('[\n\n{"conversations": [{"from":', 3, "conversation", '{"conversations": [{"from":'),
        ('[{"conversations": []}', 1, "file", "its end"),
        ("", 1, "format", "an empty file"),
        ("a,b\n1,2\n", 1, "format", "a,b"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, text: str, line: int, field: str, value: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text, encoding="utf-8")
    error = refused(file)
    assert (error.line, error.field, error.value) == (line, field, value)


def test_the_line_before_is_named_where_times_go_back(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(BURST + "4,m,10,2,12,x")
    assert refused(file).allowed == "times in ascending order, so not before 5 of line 2"


def test_not_text(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(AZURE.encode() + b"\xff\xfe,5,5\n")
    assert (refused(file).line, refused(file).field) == (3, "text")
    file.write_bytes(b'[{"conversations": [{"from": "human", "value": "\xff"}]}]')
    assert refused(file).field == "text"


def test_a_line_without_end(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b'{"timestamp": 0,' + b" " * MAX_LINE_BYTES)
    error = refused(file)
    assert (error.line, error.field) == (1, "line")


def test_one_conversation_of_more_tokens_than_any_model_takes(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    turns = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    file.write_text(json.dumps([{"conversations": turns}]))
    with pytest.raises(TraceError, match="12000000 tokens"):
        list(load(file, timing=Timing(poisson(1.0), count_tokens=lambda _: 6_000_000)))


def test_sharegpt_needs_a_rate(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text("[]")
    with pytest.raises(TraceError, match="a rate of arrivals"):
        load(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")


@given(st.binary(max_size=300), st.sampled_from(["mooncake", "azure", "burstgpt", "sharegpt", "auto"]))
def test_noise_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: bytes, format: str) -> None:
    file = tmp_path_factory.getbasetemp() / "noise"
    head = {"azure": AZURE, "burstgpt": BURST, "mooncake": MOON, "sharegpt": "[", "auto": ""}[format]
    file.write_bytes(head.encode() + data)
    try:
        read = list(load(file, format, timing=Timing(poisson(1.0))))  # type: ignore[arg-type]
    except TraceError as error:
        assert error.line >= 1
    else:
        assert sum(map(len, read)) >= 1
