"""The SHA-256 of a file while it is being written, and its way to the disk at the same time.

Hashing and syncing a large file only once it is whole takes as long again as reading its source; a thread that follows
the writers hides both. It reads what was just written, which the system still has in memory.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import threading

READ_BYTES = 1 << 22
SYNC_BYTES = 1 << 26  # how much may wait in memory before the disk is asked to take it


class WrittenHash:
    """Follows the bytes of an open file (readable descriptor) from the first to the last, in a thread of its own."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._digest = hashlib.sha256()
        self._state = threading.Condition()
        self._ranges: list[tuple[int, int]] = []  # written beyond the first gap
        self._front = 0  # every byte before it is written
        self._done = 0  # every byte before it is hashed
        self._ended = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def add(self, start: int, stop: int) -> None:
        """Bytes [start, stop) are written; any thread may say so, in any order, once for every byte."""
        with self._state:
            heapq.heappush(self._ranges, (start, stop))
            while self._ranges and self._ranges[0][0] <= self._front:
                self._front = max(self._front, heapq.heappop(self._ranges)[1])
            self._state.notify()

    def finish(self) -> str:
        """Wait until all bytes before the first gap are hashed; the digest as 64 lower-case hex digits.

        Raises OSError where reading or syncing failed.
        """
        self.close()
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()

    def close(self) -> None:
        """End the thread, after what is written so far; afterwards the descriptor may be closed."""
        with self._state:
            self._ended = True
            self._state.notify()
        self._thread.join()

    def _follow(self) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        synced = 0
        try:
            while True:
                with self._state:
                    self._state.wait_for(lambda: self._ended or self._front - self._done >= READ_BYTES)
                    front, ended = self._front, self._ended
                while self._done < front:
                    part = buffer[: min(READ_BYTES, front - self._done)]
                    count = os.preadv(self._descriptor, [part], self._done)
                    if count == 0:
                        raise OSError(f"the file ends at byte {self._done}, {front} were written")
                    self._digest.update(part[:count])
                    self._done += count
                if self._done - synced >= SYNC_BYTES:
                    os.fdatasync(self._descriptor)
                    synced = self._done
                if ended:
                    return
        except OSError as error:
            self._error = error
