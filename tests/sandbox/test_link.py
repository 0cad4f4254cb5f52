"""The socket to a box."""

import os

from sandbox.link import Link, pair


async def test_a_message_sent_before_the_host_listens_still_tells_its_sender():
    ours, theirs = pair()
    theirs.send(b"0 0")
    link = Link(ours)
    assert (await link.ready).pid == os.getpid()
    link.close()
    theirs.close()
