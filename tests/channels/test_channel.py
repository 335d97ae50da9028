import multiprocessing
import os
import signal

import pytest

from embodyrl.channels.channel import PipeChannel
from embodyrl.errors import ChannelClosed, ChannelTimeout


@pytest.fixture
def ends():
    channels = [PipeChannel(end) for end in multiprocessing.Pipe()]
    yield channels
    for channel in channels:
        channel.close()


def test_messages_arrive_in_order_in_both_directions(ends):
    a, b = ends
    a.put("one")
    a.put("two")
    b.put("back")
    assert [b.get(1.0), b.get(1.0), a.get(1.0)] == ["one", "two", "back"]


def test_timeout_and_closed_channel_raise_different_errors(ends):
    a, b = ends
    with pytest.raises(ChannelTimeout):
        a.get(0.01)
    b.close()
    with pytest.raises(ChannelClosed):
        a.get(0.01)
    with pytest.raises(ChannelClosed):
        a.put("anyone there?")


def test_sending_to_a_full_pipe_times_out(ends):
    a, b = ends
    a.put(b"x" * 2**13, timeout_s=0.01)
    with pytest.raises(ChannelTimeout, match=r"did not read from the channel for 0.01 s"):
        a.put(b"x" * 2**22, timeout_s=0.01)
    assert b.get(1.0) == b"x" * 2**13


def _write(connection):
    PipeChannel(connection).put(b"x" * 2**22)


def test_partial_message_times_out():
    """`Connection.recv` would wait for the rest without a deadline; received data must not be lost."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    writer = context.Process(target=_write, args=(theirs,), daemon=True)
    writer.start()
    channel = PipeChannel(ours)
    assert ours.poll(60.0)  # it has begun, and cannot end before we read: no pipe holds 4 MiB
    os.kill(writer.pid, signal.SIGSTOP)
    os.waitpid(writer.pid, os.WUNTRACED)
    with pytest.raises(ChannelTimeout):
        channel.get(0.1)
    os.kill(writer.pid, signal.SIGCONT)
    assert channel.get(60.0) == b"x" * 2**22
    writer.join(60.0)
    channel.close()
