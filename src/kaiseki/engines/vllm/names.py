"""What requests may ask of Kaiseki in `vllm_xargs`.

The middleware puts there what it made of headers and keys, and takes away what clients sent by these names;
without it, clients that are trusted may send them. All are optional:

- `kaiseki_tenant`: who is charged.
- `kaiseki_class`: service class by name.
- `kaiseki_ttft_ms`, `kaiseki_tbt_ms`: targets in place of the class's.
- `kaiseki_priority`: place within the class, lower is sooner, 0 where nothing is said. Without it vLLM's own
  `priority` counts, which has the same sense.
- `kaiseki_key`: a number under which the middleware finds how the request ended.
"""

TENANT, CLASS, PRIORITY, KEY = "kaiseki_tenant", "kaiseki_class", "kaiseki_priority", "kaiseki_key"
TTFT_MS, TBT_MS = "kaiseki_ttft_ms", "kaiseki_tbt_ms"
PREFIX = "kaiseki_"
DEFAULT_TENANT = "default"
