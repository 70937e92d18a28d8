"""One script of client calls: `python conformance_script.py CLIENT ADDRESS [recoverable]` prints
one JSON line an outcome.

CLIENT is "jaxlib" or "holdfast". Three clients live in this one process, as threads. An outcome is
a name, a status (OK, a gRPC code, or a Python exception's name) and a value; sentences are not part
of it, they differ on purpose.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

KIND = sys.argv[1]
ADDRESS = sys.argv[2]
RECOVERABLE = "recoverable" in sys.argv
HEARTBEAT_S = 10 if RECOVERABLE else 60  # jaxlib's client that left alone is waited for so long
OUT = threading.Lock()


def make(process_id: int) -> Any:
    if KIND == "holdfast":
        from holdfast.coordination import CoordinationClient, JobIdentity, Timeouts

        return CoordinationClient(
            ADDRESS,
            process_id,
            job=JobIdentity(num_processes=3),
            timeouts=Timeouts(init_s=30, heartbeat_s=HEARTBEAT_S, shutdown_s=10, rpc_s=30),
        )
    from jax._src.lib import _jax

    return _jax.get_distributed_runtime_client(
        ADDRESS,
        process_id,
        init_timeout=30,
        heartbeat_timeout=HEARTBEAT_S,
        shutdown_timeout=10,
        shutdown_on_destruction=False,
    )


def show(value: Any) -> Any:
    return (
        value.hex()
        if isinstance(value, bytes)
        else [show(each) for each in value]
        if isinstance(value, (list, tuple))
        else value
    )


def one(name: str, call: Callable[[], Any]) -> None:
    """Makes one call and prints its outcome."""
    try:
        status = "OK"
        value = show(call())
    except (TypeError, UnicodeDecodeError) as error:
        status = type(error).__name__
        value = None
    except Exception as error:
        status = str(error).split(":")[0]
        value = None
    with OUT:
        print(json.dumps([name, status, value]), flush=True)


def together(name: str, *calls: Callable[[], Any]) -> None:
    """Makes calls at the same time, from a thread each."""
    threads = [
        threading.Thread(target=one, args=(f"{name}/{index}", call))
        for index, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def keys(a: Any, b: Any) -> None:
    one("set", lambda: a.key_value_set("k/a", "x"))
    one("set exists", lambda: a.key_value_set("k/a", "y"))
    one("set exists, same value", lambda: a.key_value_set("k/a", "x"))
    one("value unharmed", lambda: b.key_value_try_get("k/a"))
    one("set overwrite", lambda: b.key_value_set("k/a", "z", True))
    one(
        "set overwrite by name", lambda: b.key_value_set(key="k/a", value="w", allow_overwrite=True)
    )
    one("overwritten", lambda: a.key_value_try_get("k/a"))
    one("overwrite of nothing", lambda: a.key_value_set("k/new", "n", True))
    one("set bytes", lambda: a.key_value_set_bytes("k/b", b"\xff\x00\x01"))
    one("set bytes exists", lambda: a.key_value_set_bytes("k/b", b""))
    one("set bytes overwrite", lambda: a.key_value_set_bytes("k/b", b"\xff\xfe", True))
    one("get bytes", lambda: b.blocking_key_value_get_bytes("k/b", 1000))
    one("try get bytes", lambda: b.key_value_try_get_bytes("k/b"))
    one("get text that is none", lambda: b.blocking_key_value_get("k/b", 1000))
    one("try get text that is none", lambda: b.key_value_try_get("k/b"))
    one("dir text that is none", lambda: b.key_value_dir_get("k"))
    one("get", lambda: b.blocking_key_value_get("k/a", 1000))
    one("get late", lambda: b.blocking_key_value_get("k/none", 200))
    one("get bytes late", lambda: b.blocking_key_value_get_bytes("k/none", 200))
    one("get in no time", lambda: b.blocking_key_value_get("k/none", 0))
    one("get in less", lambda: b.blocking_key_value_get("k/none", -1))
    one("try get nothing", lambda: b.key_value_try_get("k/none"))
    one("try get bytes nothing", lambda: b.key_value_try_get_bytes("k/none"))
    for spelling in ("/k/a", "k//a", "k/a/", "//k///a//"):
        one(f"spelled {spelling}", lambda spelling=spelling: b.key_value_try_get(spelling))
    one("set spelled", lambda: a.key_value_set("/k//c/", "c"))
    one("set spelled exists", lambda: a.key_value_set("k/c", "c"))
    one("spelled in dir", lambda: sorted(b.key_value_dir_get_bytes("k")))
    one("dir with slash", lambda: sorted(b.key_value_dir_get_bytes("k/")))
    one("dir nothing", lambda: b.key_value_dir_get("none"))
    one("dir of a key", lambda: b.key_value_dir_get("k/a"))
    one("dir of all", lambda: b.key_value_dir_get_bytes(""))
    one("prefix is no dir", lambda: (a.key_value_set("kk/1", "1"), b.key_value_dir_get("k/new"))[1])
    one("empty key", lambda: a.key_value_set("", "e"))
    one("empty key exists", lambda: a.key_value_set("/", "e"))
    one("empty key get", lambda: b.key_value_try_get(""))
    one("empty value", lambda: a.key_value_set("k/e", ""))
    one("empty value get", lambda: b.key_value_try_get("k/e"))
    one("empty value get bytes", lambda: b.key_value_try_get_bytes("k/e"))
    one("unicode", lambda: (a.key_value_set("k/ü", "ö"), b.key_value_try_get("k/ü"))[1])
    one(
        "big",
        lambda: (
            a.key_value_set_bytes("k/big", b"x" * (9 << 20)),
            len(b.key_value_try_get_bytes("k/big")),
        )[1],
    )
    one("delete", lambda: a.key_value_delete("k/a"))
    one("deleted", lambda: b.key_value_try_get("k/a"))
    one("set again after delete", lambda: a.key_value_set("k/a", "again"))
    one("delete nothing", lambda: a.key_value_delete("none"))
    one("delete dir", lambda: a.key_value_delete("k"))
    one("dir is empty", lambda: b.key_value_dir_get("k"))
    one("sibling stays", lambda: b.key_value_try_get("kk/1"))
    one(
        "delete key with children",
        lambda: (a.key_value_set("p", "1"), a.key_value_set("p/q", "2"), a.key_value_delete("p"))[
            2
        ],
    )
    one("children gone", lambda: b.key_value_try_get("p/q"))
    one("increment", lambda: a.key_value_increment("n", 3))
    one("increment on", lambda: b.key_value_increment("n", 4))
    one("decrement", lambda: a.key_value_increment("n", -9))
    one("increment by 0", lambda: a.key_value_increment("n", 0))
    one("counter is text", lambda: a.key_value_try_get("n"))
    one(
        "increment of a set number",
        lambda: (a.key_value_set("m", "41"), a.key_value_increment("m", 1))[1],
    )
    one(
        "increment of no number",
        lambda: (a.key_value_set("t", "abc"), a.key_value_increment("t", 1))[1],
    )
    one("no number unharmed", lambda: a.key_value_try_get("t"))
    one("key of another type", lambda: a.key_value_set(1, "x"))
    one("value of another type", lambda: a.key_value_set("x", b"x"))
    one("bytes of another type", lambda: a.key_value_set_bytes("x", "x"))
    together(
        "get waits for set",
        lambda: b.blocking_key_value_get("later", 5000),
        lambda: a.key_value_set("later", "here"),
    )
    together(
        "two wait",
        *[lambda c=c: c.blocking_key_value_get("later2", 5000) for c in (a, b)],
        lambda: a.key_value_set("later2", "2"),
    )
    together(
        "many increments",
        *[lambda c=c: c.key_value_increment("many", 1) and None for c in (a, b) * 4],
    )
    one("many increments sum", lambda: a.key_value_try_get("many"))


def barriers(a: Any, b: Any, c: Any) -> None:
    everyone = (a, b, c)
    for round_number in range(3):
        together(
            f"barrier round {round_number}",
            *[lambda client=client: client.wait_at_barrier("all", 5000) for client in everyone],
        )
    one("alone", lambda: a.wait_at_barrier("alone", 1000, [0]))
    one(
        "alone again, by name",
        lambda: a.wait_at_barrier(barrier_id="alone", timeout_in_ms=1000, process_ids=[0]),
    )
    one("alone in no time", lambda: a.wait_at_barrier("alone0", 0, [0]))
    one("alone in less", lambda: a.wait_at_barrier("alone1", -5, [0]))
    together(
        "pair",
        *[lambda client=client: client.wait_at_barrier("pair", 5000, [0, 1]) for client in (a, b)],
    )
    together(
        "pair in any order",
        lambda: a.wait_at_barrier("pair2", 5000, [0, 1]),
        lambda: b.wait_at_barrier("pair2", 5000, [1, 0]),
    )
    one("late", lambda: a.wait_at_barrier("late", 300))
    one("late again", lambda: a.wait_at_barrier("late", 300))
    one("came too late", lambda: b.wait_at_barrier("late", 300))
    one("resynchronised", lambda: b.wait_at_barrier("late", 300))
    one("not among", lambda: a.wait_at_barrier("not among", 1000, [1]))
    one("not in the job", lambda: a.wait_at_barrier("unknown", 1000, [0, 7]))
    one("negative process", lambda: a.wait_at_barrier("negative", 1000, [0, -1]))
    one("no processes means all", lambda: a.wait_at_barrier("none named", 300, []))
    one("other participants later", lambda: a.wait_at_barrier("alone", 300, [0, 1]))
    together(
        "wide names never meet",
        *[lambda client=client: client.wait_at_barrier("x" * 1000, 5000) for client in everyone],
    )
    together(
        "names apart", *[lambda n=n: a.wait_at_barrier(f"apart{n}", 5000, [0]) for n in range(3)]
    )


def live(a: Any, b: Any, c: Any) -> None:
    def ids(client: Any, asked: list[int]) -> list[int]:
        return sorted(client.get_live_nodes(asked))

    together("live", *[lambda client=client: ids(client, [0, 1, 2]) for client in (a, b, c)])
    together("live pair", *[lambda client=client: ids(client, [0, 1]) for client in (a, b)])
    one("live alone", lambda: ids(a, [0]))
    one("live twice", lambda: ids(a, [0, 0]))
    one("live with unknown", lambda: ids(a, [0, 9]))
    one("live without me", lambda: ids(a, [1]))
    one("live of nobody", lambda: ids(a, []))
    one("incarnations stay", lambda: a.get_live_nodes([0]) == a.get_live_nodes([0]))


def leaving(a: Any, b: Any, c: Any) -> None:
    if RECOVERABLE:
        one("leave alone", c.shutdown)
        # A barrier with one who left: jaxlib's service waits for the time-out, ours says so at
        # once; not compared.
        one("barrier without", lambda: a.wait_at_barrier("without", 5000, [0]))
        together(
            "live without",
            *[lambda client=client: sorted(client.get_live_nodes([0, 1, 2])) for client in (a, b)],
        )
        one("keys stay", lambda: a.key_value_try_get("kk/1"))
        together("leave", a.shutdown, b.shutdown)
    else:
        one("connect twice", a.connect)
        together("leave", a.shutdown, b.shutdown, c.shutdown)
    one("leave twice", a.shutdown)


def main() -> None:
    a, b, c = clients = [make(process_id) for process_id in range(3)]
    together("connect", *[client.connect for client in clients])
    keys(a, b)
    barriers(a, b, c)
    live(a, b, c)
    leaving(a, b, c)


main()
