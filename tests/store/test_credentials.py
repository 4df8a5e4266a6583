"""A whole run on S3: the credentials it works with are in nothing that it writes, prints or lets a program see."""

import io
from pathlib import Path

import pyarrow.parquet as pq

from posttrain_core.store import open_store
from tests.crash.harness import run_to_end
from tests.crash.test_faulty_server import tiny
from tests.radosgw import ACCESS_KEY, SECRET_KEY

SPY = """```python
import os
def f(x):
    found = ["a spy found", str(dict(os.environ))]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ") as file:
                found.append(file.read())
        except OSError:
            pass
    return found
```"""


def test_credentials_are_in_nothing_that_a_run_leaves(rados_url: str, tmp_path: Path) -> None:
    config = tiny(
        rados_url,
        sampler={"type": "scripted", "responses": [SPY, "x+1"]},
        plan={"problems_per_iteration": 4, "group_size": 4, "max_new_tokens": 1000},
    )
    log = tmp_path / "log"
    run_to_end(config, log)
    store, texts = open_store(rados_url), {"log": log.read_text()}
    for info in store.list(""):
        data = store.get(info.key)
        if info.key.endswith(".parquet"):
            texts[info.key] = str(pq.read_table(io.BytesIO(data)).to_pylist())
        else:
            texts[info.key] = data.decode(errors="replace")
    assert any("a spy found" in text for key, text in texts.items() if "executions" in key), "no spy has looked"
    assert not [key for key, text in texts.items() if ACCESS_KEY in text or SECRET_KEY in text]
