"""Reading traces: the recorded ones, and whatever is written in their formats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.work.streams import column, reuse

from kaiseki.work.arrivals import Profile, poisson
from kaiseki.work.batches import BATCH_ROWS, NONE
from kaiseki.work.shaping import Shape
from kaiseki.work.traces.opening import Timing, detect, load

TOKENS = st.integers(1, 10_000_000)
NANOSECONDS = st.integers(0, 10**16)


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace"


def azure_time(ns: int) -> str:
    """Since 1970 as the trace writes it, with 7 digits of fraction."""
    return f"{np.datetime64(ns // 10**9, 's')}".replace("T", " ") + f".{ns % 10**9 // 100:07d}"


@pytest.mark.traces
def test_azure_conversation(shared_traces: Path) -> None:
    batches = list(load(shared_traces / "azure_conv_2023.csv"))
    assert [len(batch) for batch in batches] == [BATCH_ROWS, 19_366 - BATCH_ROWS]
    assert batches[1].first == BATCH_ROWS
    assert column(batches, "arrival_ns")[:3].tolist() == [0, 4_314_579_000, 4_541_877_000]
    assert (batches[0].prompt_tokens[:2].tolist(), batches[0].output_tokens[:2].tolist()) == (
        [374, 396],
        [44, 109],
    )
    assert column(batches, "prompt_tokens").mean() == pytest.approx(1154.6974, abs=1e-4)
    assert column(batches, "output_tokens").mean() == pytest.approx(211.1260, abs=1e-4)


@pytest.mark.traces
def test_mooncake_conversation(shared_traces: Path) -> None:
    batches = list(load(shared_traces / "mooncake_conversation.jsonl"))
    assert sum(map(len, batches)) == 12_031
    assert batches[0].arrival_ns[-1] == 3_536_999_000_000
    assert batches[0].blocks.row(1).tolist() == [0, *range(14, 28)]
    hit, branching = reuse(batches)
    assert (hit, branching) == (pytest.approx(0.3664, abs=1e-4), pytest.approx(0.3872, abs=1e-4))


@pytest.mark.traces
def test_shrunk_as_for_the_comparison_with_vidur(shared_traces: Path) -> None:
    shape = Shape(requests=1000, max_total_tokens=4096)
    (batch,) = load(shared_traces / "azure_conv_2023.csv", shape=shape)
    assert len(batch) == 1000
    assert (batch.prompt_tokens + batch.output_tokens).max() == 4096


@given(st.lists(st.tuples(NANOSECONDS, TOKENS, TOKENS), min_size=1, max_size=40))
def test_azure_round_trip(file: Path, requests: list[tuple[int, int, int]]) -> None:
    requests = sorted((ns // 100 * 100, prompt, output) for ns, prompt, output in requests)
    rows = [f"{azure_time(ns)},{prompt},{output}" for ns, prompt, output in requests]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    (batch,) = load(file)
    assert batch.arrival_ns.tolist() == [ns - requests[0][0] for ns, _, _ in requests]
    assert batch.prompt_tokens.tolist() == [prompt for _, prompt, _ in requests]
    assert batch.output_tokens.tolist() == [output for _, _, output in requests]


@given(st.lists(st.tuples(st.integers(0, 10**10), TOKENS, TOKENS, st.booleans()), min_size=1, max_size=20))
def test_mooncake_round_trip(file: Path, requests: list[tuple[int, int, int, bool]]) -> None:
    requests.sort()
    lines, ids = [], []
    for ms, prompt, output, known in requests:
        line = {"timestamp": ms, "input_length": prompt, "output_length": output}
        ids.append(list(range(-(-prompt // 512))) if known else [])
        lines.append(json.dumps(line | ({"hash_ids": ids[-1]} if known else {})))
    file.write_text("\n\n".join(lines) + "\n")
    (batch,) = load(file)
    assert batch.arrival_ns.tolist() == [(ms - requests[0][0]) * 10**6 for ms, *_ in requests]
    assert batch.prompt_tokens.tolist() == [prompt for _, prompt, _, _ in requests]
    assert [batch.blocks.row(i).tolist() for i in range(len(requests))] == ids


@given(st.lists(st.tuples(st.integers(0, 10**8), TOKENS, st.integers(0, 5000)), min_size=1, max_size=40))
def test_burstgpt_round_trip_without_failures(file: Path, requests: list[tuple[int, int, int]]) -> None:
    requests = [(0, 1, 1), *sorted(requests)]
    rows = [f"{s},ChatGPT,{p},{o},{p + o},API log" for s, p, o in requests]
    file.write_text(
        "\n".join(["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", *rows])
    )
    (batch,) = load(file)
    answered = [request for request in requests if request[2]]
    assert batch.arrival_ns.tolist() == [s * 10**9 for s, _, _ in answered]
    assert batch.output_tokens.tolist() == [output for _, _, output in answered]


def test_azure_times_with_offsets_and_other_columns(tmp_path: Path) -> None:
    file = tmp_path / "2024.csv"
    file.write_text(
        "TIMESTAMP,note,ContextTokens,GeneratedTokens\n"
        '2024-05-10 00:00:00.009930+00:00,"a, b",10,2\n'
        "2024-05-10T02:00:01.00993+02:00,x,11,3\n"
        "2024-05-10 00:00:02Z,x,12,4\n"
    )
    (batch,) = load(file)
    assert batch.arrival_ns.tolist() == [0, 10**9, 1_990_070_000]
    assert batch.prompt_tokens.tolist() == [10, 11, 12]


def test_byte_order_marks_and_windows_lines(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_bytes("\ufeffTimestamp,Request tokens,Response tokens\r\n5,10,2\r\n5.5,11,3\r\n".encode())
    (batch,) = load(file)
    assert batch.arrival_ns.tolist() == [0, 500_000_000]


def test_the_reader_stops_at_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    rows = "\n".join(f"{i},1,1" for i in range(BATCH_ROWS))
    file.write_text(f"Timestamp,Request tokens,Response tokens\n{rows}\nbroken\n")
    (batch,) = load(file, shape=Shape(requests=BATCH_ROWS))
    assert len(batch) == BATCH_ROWS


CONVERSATIONS = [
    {"id": "a", "conversations": [
        {"from": "system", "value": "x" * 40},
        {"from": "human", "value": "y" * 40},
        {"from": "gpt", "value": "z" * 8},
        {"from": "human", "value": "ö" * 10},
        {"from": "gpt", "value": ""},
    ]},
    {"id": "empty", "conversations": []},
    {"id": "b", "conversations": [
        {"from": "gpt", "value": "1234"},
        {"from": "human", "value": "?"},
        {"from": "gpt", "value": "!"},
    ]},
]  # fmt: skip


@pytest.mark.parametrize("indent", [None, 2])
def test_sharegpt_conversations_are_sessions(tmp_path: Path, indent: int | None) -> None:
    file = tmp_path / "chats.json"
    file.write_text(json.dumps(CONVERSATIONS, indent=indent, ensure_ascii=False), encoding="utf-8")
    (batch,) = load(file, timing=Timing(Profile((1.0,), 1.0), seed=4))
    order = np.argsort(batch.follow.session, kind="stable")
    assert batch.follow.session[order].tolist() == [0, 0, 1]
    assert batch.prompt_tokens[order].tolist() == [20, 27, 2]
    assert batch.output_tokens[order].tolist() == [2, 1, 1]
    assert batch.follow.parent[order].tolist() == [NONE, order[0], NONE]
    assert batch.follow.followers[order].tolist() == [1, 0, 0]
    assert (np.diff(batch.arrival_ns) >= 0).all()


def test_sharegpt_by_a_given_tokenizer_and_longer_than_a_piece(tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    long = [
        {
            "conversations": [
                {"from": "user", "value": "w " * 400_000},
                {"from": "assistant", "value": "a b\n"},
            ]
        }
    ]
    file.write_text(json.dumps(long * 3))
    timing = Timing(poisson(1.0), count_tokens=lambda text: len(text.split()))
    (batch,) = load(file, timing=timing)
    assert batch.prompt_tokens.tolist() == [400_000] * 3
    assert batch.output_tokens.tolist() == [2] * 3


@pytest.mark.parametrize(
    ("text", "format"),
    [
        ('{"timestamp": 0}', "mooncake"),
        ("\n[\n", "sharegpt"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "azure"),
        ('"Timestamp","Model","Request tokens","Response tokens"', "burstgpt"),
    ],
)
def test_formats_are_told_apart(tmp_path: Path, text: str, format: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    assert detect(file) == format
