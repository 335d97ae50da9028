import multiprocessing
import os
import pickle
import signal

import numpy as np
import pytest

from embodyrl.channels.arena import Arena, ArenaFullError, ArenaHandle, get_record_indices
from embodyrl.channels.layout import Field, Record, RecordLayout
from embodyrl.errors import EmbodyError, StaleRecordError

LAYOUT = RecordLayout(
    fields=(Field(name="image", dtype="uint8", shape=(8, 8, 3)), Field(name="value", dtype="float32", shape=(0,)))
)


@pytest.fixture
def arena():
    arena = Arena.create(LAYOUT, 3)
    yield arena
    arena.close()


def test_record_is_readable_only_after_a_complete_write(arena):
    record_ref = arena.allocate()
    with pytest.raises(StaleRecordError, match="ALLOCATED"):
        arena.read([record_ref])
    with pytest.raises(RuntimeError, match="half way"), arena.write(record_ref):
        raise RuntimeError("half way")
    with pytest.raises(StaleRecordError, match="WRITING"):
        arena.read([record_ref])
    with arena.write(record_ref) as record:
        arena["image"][record] = 7
    assert arena["image"][arena.read([record_ref])].sum() == 7 * 8 * 8 * 3


def test_reference_to_a_freed_record_is_invalid(arena):
    old = arena.allocate()
    with arena.write(old):
        pass
    arena.free([old])
    for use in (lambda: arena.read([old]), lambda: arena.free([old]), lambda: arena.write(old).__enter__()):
        with pytest.raises(StaleRecordError, match="stale"):
            use()
    record_refs = [arena.allocate() for _ in range(3)]
    assert get_record_indices([old])[0] in get_record_indices(record_refs)
    with pytest.raises(StaleRecordError):
        arena.read([old])


def test_reference_to_a_reused_record_is_invalid(arena):
    """The record is readable by another reference: only the sequence numbers differ."""
    old = arena.allocate()
    with arena.write(old):
        pass
    arena.free([old])
    record = get_record_indices([old])[0]
    new = next(t for t in (arena.allocate() for _ in range(3)) if get_record_indices([t])[0] == record)
    with arena.write(new):
        pass
    assert arena.read([new]) == [record]
    for use in (lambda: arena.read([old]), lambda: arena.free([old]), lambda: arena.write(old).__enter__()):
        with pytest.raises(StaleRecordError, match=f"stale: the record has sequence {arena['sequence'][record]}"):
            use()


def test_allocating_beyond_capacity_is_an_error(arena):
    for _ in range(3):
        arena.allocate()
    with pytest.raises(ArenaFullError, match="1 records: 0 of 3"):
        arena.allocate()


def test_insufficient_memory_is_an_error_before_allocation():
    huge = RecordLayout(fields=(Field(name="image", dtype="uint8", shape=(2**40,)),))
    with pytest.raises(EmbodyError, match=r"needs 1024\.00 GiB"):
        Arena.create(huge, 1)


def test_writing_one_record_does_not_change_other_records(arena):
    a, b = arena.allocate(), arena.allocate()
    with arena.write(a) as record:
        arena["image"][record] = 255
    with arena.write(b) as record:
        arena["image"][record] = 1
    assert np.array_equal(np.unique(arena["image"][arena.read([a])]), [255])


def _fill(handle: ArenaHandle, record_ref: int) -> None:
    arena = Arena.attach(handle)
    with arena.write(record_ref) as record:
        arena["image"][record] = 42
    arena.close()


def _die_while_writing(handle: ArenaHandle, record_ref: int) -> None:
    arena = Arena.attach(handle)
    with arena.write(record_ref) as record:
        arena["image"][record] = 13
        os.kill(os.getpid(), signal.SIGKILL)


def _run(target, *args) -> int | None:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    process.join(60)
    return process.exitcode


@pytest.mark.integration
def test_attached_process_writes_to_shared_memory(arena):
    record_ref = arena.allocate()
    assert _run(_fill, arena.handle, record_ref) == 0
    assert arena["image"][arena.read([record_ref])[0]].min() == 42


@pytest.mark.integration
def test_record_of_a_killed_writer_can_be_reused(arena):
    record_ref = arena.allocate()
    assert _run(_die_while_writing, arena.handle, record_ref) == -signal.SIGKILL
    with pytest.raises(StaleRecordError, match="WRITING"):
        arena.read([record_ref])
    arena.free([record_ref])
    assert arena.num_free == 3


def mapped_from_dev_shm() -> set[str]:
    """Return the mappings of this process below /dev/shm; other programs also use this folder."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return {line[line.index("/dev/shm/") :] for line in maps if "/dev/shm/" in line}


def test_arena_creates_no_files_in_dev_shm():
    before = mapped_from_dev_shm()
    arena = Arena.create(LAYOUT, 100)
    assert mapped_from_dev_shm() == before
    arena.close()
    with pytest.raises(StaleRecordError, match="Cannot attach"):
        Arena.attach(arena.handle)


def test_record_column_is_pickled_as_its_name():
    assert pickle.loads(pickle.dumps(Record.images)) == "images"
    assert type(pickle.loads(pickle.dumps(Record.images))) is str
