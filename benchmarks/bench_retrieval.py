"""How many queries a second does a retriever answer, and what do they find?

wiki2hop's own questions as queries, five passages each: in this process, one by one and in batches; through
`astraflow retriever` in a process of its own, asked by 1, 32 and 256 clients at once with one query a request, as
agents do. Recall@5 is the share of questions of which one search finds all support.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from astraflow.config.env import cache_dir, child_environment
from astraflow.retrieval.retriever import Retriever, Settings, open_retriever
from astraflow.retrieval.serving.client import Ask
from astraflow.sources.wiki2hop import KINDS, Wiki2HopSource
from benchmarks.harness import Check, Result

TOPK = 5
MIN_PER_S = 1000.0
EXPECTED = {"single": 0.99, "comparison": 0.89}  # of one search; bridge and bridge-comparison need several


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="at least so long is measured, of each")
    parser.add_argument("--vectors", default="", help=".npy of the passages, to measure those too")
    parser.add_argument("--encoder", default="", help="of queries, as the run file names it")
    options = parser.parse_args()
    source = Wiki2HopSource(split="all")
    rows = [source.row(number) for number in range(len(source))]
    result = Result("retrieval", {"questions": len(rows), "topk": TOPK, "seconds": options.seconds})
    with tempfile.TemporaryDirectory() as fresh:
        began = time.perf_counter()
        words = open_retriever(Settings(), cache_root=Path(fresh))
        made_s = time.perf_counter() - began
        began = time.perf_counter()
        open_retriever(Settings(), cache_root=Path(fresh))
        result.rows.append(
            {"what": "index", "passages": len(words), "made_s": made_s, "opened_s": time.perf_counter() - began}
        )
        for name, retriever in _retrievers(words, options).items():
            result.rows.append({"what": f"recall@{TOPK}, {name}", **_recall(retriever, rows)})
            for batch in (1, 32):
                per_s = _in_process(retriever, rows, batch, options.seconds)
                result.rows.append({"what": f"in process, {name}", "at_once": batch, "per_s": per_s})
    result.rows += _served([row["question"] for row in rows], options.seconds)
    recall = next(row for row in result.rows if row["what"] == f"recall@{TOPK}, words")
    result.checks += [Check.at_least(f"recall@{TOPK}, {kind}", recall[kind], least) for kind, least in EXPECTED.items()]
    for row in result.rows:
        if row["what"] in ("in process, words", "service") and row["at_once"] in (1, 256):
            result.checks.append(
                Check.at_least(f"{row['what']}, {row['at_once']} at once", row["per_s"], MIN_PER_S, "1/s")
            )
    result.show()
    result.write()


def _retrievers(words: Retriever, options: argparse.Namespace) -> dict[str, Retriever]:
    if not options.vectors:
        return {"words": words}
    whole: dict[str, Any] = {"vectors": options.vectors, "encoder": options.encoder}
    return {
        "words": words,
        "vectors": open_retriever(Settings(mode="vectors", **whole), cache_root=cache_dir()),
        "both": open_retriever(Settings(mode="both", **whole), cache_root=cache_dir()),
    }


def _recall(retriever: Retriever, rows: list[dict[str, Any]]) -> dict[str, float]:
    found = defaultdict(list)
    for row, hits in zip(rows, retriever.search([row["question"] for row in rows], TOPK), strict=True):
        found[row["kind"]].append(set(row["support"]) <= {hit.passage.id for hit in hits})
    every = [one for kind in found.values() for one in kind]
    return {**{kind: float(np.mean(found[kind])) for kind in KINDS}, "all": float(np.mean(every))}


def _in_process(retriever: Retriever, rows: list[dict[str, Any]], batch: int, seconds: float) -> float:
    queries = [row["question"] for row in rows]
    num, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for begin in range(0, len(queries) - batch + 1, batch):
            num += len(retriever.search(queries[begin : begin + batch], TOPK))
            if time.perf_counter() - began >= seconds:
                break
    return num / (time.perf_counter() - began)


def _served(queries: list[str], seconds: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "astraflow", "retriever", f"--ready-file={ready}"]
        service = subprocess.Popen(command, env=child_environment(None), stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while not ready.exists():
                if service.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the retriever did not start")
                time.sleep(0.05)
            url = msgspec.json.decode(ready.read_bytes())["url"]
            return [asyncio.run(_load(url, queries, at_once, seconds)) for at_once in (1, 32, 256)]
        finally:
            service.terminate()
            service.wait(10)


async def _load(url: str, queries: list[str], at_once: int, seconds: float) -> dict[str, Any]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    bodies = [msgspec.json.encode(Ask([query], TOPK)) for query in queries]
    head = f"POST /retrieve HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    took: list[float] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        turn = number
        while time.perf_counter() < end:
            body, began = bodies[turn % len(bodies)], time.perf_counter()
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
            if not answer.startswith(b"HTTP/1.1 200"):
                raise SystemExit(answer.decode())
            took.append(time.perf_counter() - began)
            turn += at_once
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(at_once)))
    wall = time.perf_counter() - began
    p50, p99 = np.percentile(took, [50, 99]) * 1e3
    return {
        "what": "service",
        "at_once": at_once,
        "per_s": len(took) / wall,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
    }


if __name__ == "__main__":
    main()
