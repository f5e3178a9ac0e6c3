"""Values kept in memory up to a weight."""

from __future__ import annotations

import os
import signal

from castore.cache import Cache


def test_a_child_that_is_forked_while_a_thread_holds_the_cache_begins_anew() -> None:
    cache: Cache[str, bytes] = Cache(10, len)
    assert cache.get("a", lambda: b"parent's") == b"parent's"
    with cache._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            found = cache.get("a", lambda: b"child's")
            os._exit(0 if (found, cache.weight) == (b"child's", 7) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.get("a", lambda: b"again") == b"parent's"
