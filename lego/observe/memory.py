"""Peak memory of this process and all its descendants: the one file for psutil."""

import asyncio

import psutil

GIB = 1 << 30


class PeakMemory:
    """Highest sum of resident sizes seen; shared pages count once per process, so it errs upward."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self.peak_gib = 0.0

    def look(self) -> None:
        total = 0
        for process in [self._me, *self._me.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.Error:  # it ended, or is not ours to look at
                continue
        self.peak_gib = max(self.peak_gib, total / GIB)

    async def watch(self, every_s: float = 2.0) -> None:
        """Looks until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(every_s)
