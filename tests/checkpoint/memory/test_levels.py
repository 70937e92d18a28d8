from __future__ import annotations

import pytest

from holdfast.checkpoint.memory.levels import (
    UNLIMITED_BYTES,
    MemoryLevel,
    find_cgroup_folders,
    find_levels,
)

GIB = 1 << 30
MEMINFO = "MemTotal: 64 kB\nMemFree: 8 kB\nMemAvailable: 32 kB\nSwapFree: 4 kB\n"
NO_LIMIT = "9223372036854771712\n"  # what v1 calls none
V1_MOUNT = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
)
V2_MOUNT = "29 22 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"


def v1_files(folder: str, limit: str, used: int, stat: str = "") -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": stat,
        f"{folder}/memory.use_hierarchy": "1\n",
    }


def v2_files(folder: str, limit: str, used: int, stat: str = "") -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


def test_v1_counts_clean_file_pages_of_the_whole_group_as_free() -> None:
    """Dirty pages, and those on their way out, are free only in the end. What is on the lists of
    files and in none was marked as free, and may have been written since.
    """
    stat = (
        "cache 1\ntotal_cache 420\ntotal_shmem 20\n"
        "total_inactive_file 300\ntotal_active_file 200\ntotal_dirty 50\n"
        "total_writeback 25\nhierarchical_memory_limit 2000\n"
    )
    files = {
        "/proc/self/cgroup": "5:devices:/job\n4:memory:/job\n0::/\n",
        "/proc/self/mountinfo": V1_MOUNT.format(root="/") + V2_MOUNT.format(root="/"),
        **v1_files("/sys/fs/cgroup/memory/job", "2000\n", 1500, stat),
        **v1_files("/sys/fs/cgroup/memory", NO_LIMIT, 9000),
    }
    (level,) = find_levels(files.get)
    assert level == MemoryLevel(
        "the cgroup /job", 2000, 925, 1000, folder="/sys/fs/cgroup/memory/job", lazy_bytes=100
    )


def test_of_the_machine_so_much_may_be_in_use_again() -> None:
    """What is on the lists of file pages and in no file: 10 of 40 kB. All, where none are told."""
    told = "Cached: 31 kB\nBuffers: 2 kB\nShmem: 3 kB\nActive(file): 22 kB\nInactive(file): 18 kB\n"
    (level,) = find_levels({"/proc/meminfo": MEMINFO + told}.get)
    assert level.lazy_bytes == 10 << 10
    (level,) = find_levels({"/proc/meminfo": MEMINFO}.get)
    assert level.lazy_bytes == UNLIMITED_BYTES


def test_each_group_above_bounds_too() -> None:
    """The least headroom may be far up; groups without a limit are passed over."""
    files = {
        "/proc/self/cgroup": "0::/jobs/a/task\n",
        "/proc/self/mountinfo": V2_MOUNT.format(root="/"),
        "/proc/meminfo": MEMINFO,
        **v2_files("/sys/fs/cgroup/jobs/a/task", "max", 100),
        **v2_files("/sys/fs/cgroup/jobs/a", "1000", 100, "inactive_file 10\nfile_dirty 10\n"),
        **v2_files("/sys/fs/cgroup/jobs", "4000", 3900),
    }
    assert [(level.name, level.free_bytes) for level in find_levels(files.get)] == [
        ("the cgroup /jobs/a", 900),
        ("the cgroup /jobs", 100),
        ("this machine", 32 << 10),
    ]
    assert find_cgroup_folders(files.get) == [
        "/sys/fs/cgroup/jobs/a/task",
        "/sys/fs/cgroup/jobs/a",
        "/sys/fs/cgroup/jobs",
        "/sys/fs/cgroup",
    ]


@pytest.mark.parametrize(
    ("cgroup", "root"),
    [
        ("0::/", "/"),  # a namespace of its own
        ("0::/docker/abc", "/docker/abc"),  # none: the mount shows its part of the hierarchy alone
        ("0::/../other", "/"),  # it was moved out of its namespace's root
        ("0::/docker/abc", "/docker/abcdef"),  # another's
    ],
)
def test_a_container_sees_its_own_group_at_the_mount(cgroup: str, root: str) -> None:
    """A path that does not lie in what is mounted says nothing."""
    files = {
        "/proc/self/cgroup": cgroup,
        "/proc/self/mountinfo": V2_MOUNT.format(root=root),
        **v2_files("/sys/fs/cgroup", "1000", 400),
    }
    (level,) = find_levels(files.get)
    assert (level.name, level.free_bytes) == ("this cgroup", 600)


def test_v1_in_a_container_knows_of_a_limit_above_that_is_not_seen() -> None:
    """`hierarchical_memory_limit` is the least of all groups above."""
    files = {
        "/proc/self/cgroup": "7:memory:/docker/abc\n",
        "/proc/self/mountinfo": V1_MOUNT.format(root="/docker/abc"),
        **v1_files("/sys/fs/cgroup/memory", NO_LIMIT, 100, "hierarchical_memory_limit 1000\n"),
    }
    (level,) = find_levels(files.get)
    assert (level.limit_bytes, level.free_bytes) == (1000, 900)


def test_v1_groups_that_charge_nothing_above_are_not_asked_further_up() -> None:
    files = {
        "/proc/self/cgroup": "7:memory:/a/b\n",
        "/proc/self/mountinfo": V1_MOUNT.format(root="/"),
        **v1_files("/sys/fs/cgroup/memory/a/b", "1000", 10),
        **v1_files("/sys/fs/cgroup/memory/a", "20", 10),
        "/sys/fs/cgroup/memory/a/memory.use_hierarchy": "0\n",
    }
    assert [level.free_bytes for level in find_levels(files.get)] == [990]


def test_memory_high_and_swap_count() -> None:
    """Above `memory.high` a group is throttled; what can be swapped out is there in the end."""
    files = {
        "/proc/self/cgroup": "0::/a",
        "/proc/self/mountinfo": V2_MOUNT.format(root="/"),
        "/proc/meminfo": "MemTotal: 64 kB\nMemAvailable: 32 kB\nSwapFree: 1 kB\n",
        **v2_files("/sys/fs/cgroup/a", "2000", 500),
        "/sys/fs/cgroup/a/memory.high": "1000\n",
        "/sys/fs/cgroup/a/memory.swap.max": "700\n",
        "/sys/fs/cgroup/a/memory.swap.current": "100\n",
    }
    level, machine = find_levels(files.get)
    assert (level.free_bytes, level.most_bytes) == (500, 1100)
    assert (machine.free_bytes, machine.most_bytes) == (32 << 10, 33 << 10)


def test_v1_swap_is_what_memsw_leaves() -> None:
    files = {
        "/proc/self/cgroup": "7:memory:/a\n",
        "/proc/self/mountinfo": V1_MOUNT.format(root="/"),
        "/proc/meminfo": "MemAvailable: 9000000 kB\nSwapFree: 9000000 kB\n",
        **v1_files("/sys/fs/cgroup/memory/a", "1000", 400),
        "/sys/fs/cgroup/memory/a/memory.memsw.limit_in_bytes": "1500\n",
        "/sys/fs/cgroup/memory/a/memory.memsw.usage_in_bytes": "600\n",
    }
    level, _ = find_levels(files.get)
    assert (level.free_bytes, level.most_bytes) == (600, 900)


def test_a_group_above_its_limit_has_nothing_left() -> None:
    """A limit may have been lowered."""
    files = {
        "/proc/self/cgroup": "0::/a",
        "/proc/self/mountinfo": V2_MOUNT.format(root="/"),
        **v2_files("/sys/fs/cgroup/a", "100", 500),
    }
    assert [level.free_bytes for level in find_levels(files.get)] == [0]


@pytest.mark.parametrize(
    "files",
    [
        {},  # macOS
        {"/proc/self/cgroup": "0::/a"},
        {"/proc/self/cgroup": "0::/a", "/proc/self/mountinfo": V2_MOUNT.format(root="/")},
        {
            "/proc/self/cgroup": "nonsense",
            "/proc/self/mountinfo": "short line\n1 2 3:4 / /x - cgroup\n",
            "/proc/meminfo": "MemTotal:\n",
        },
    ],
)
def test_what_is_not_there_is_no_level(files: dict[str, str]) -> None:
    assert find_levels(files.get) == []


def test_mount_points_may_have_blanks() -> None:
    """The kernel writes them as octal escapes."""
    files = {
        "/proc/self/cgroup": "0::/a",
        "/proc/self/mountinfo": "29 22 0:26 / /my\\040cgroups rw - cgroup2 cgroup2 rw\n",
        **v2_files("/my cgroups/a", "100", 50),
    }
    assert [level.free_bytes for level in find_levels(files.get)] == [50]
