"""What a process that evaluates foreign text may still do: the kernel's means, from the strongest to those that are always there.

Namespaces take away the network, other processes and the run's user; Landlock takes away files (and TCP where there are no
namespaces); capabilities are dropped; resource limits bound memory, processes, files and CPU time. Each is used where the machine
allows it, and `keeper.confine` says what could not be had.
"""

import contextlib
import ctypes
import os
import resource
import site
import sys
from pathlib import Path

MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 8, 38
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
SIGKILL = 9
NOBODY = 65534

# System calls by number: the same on every architecture since Linux 5.13.
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
FS_EXECUTE, FS_WRITE_FILE, FS_READ_FILE, FS_READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
# Every file right of each version of Landlock, and the rights to TCP; what is handled and not allowed is denied.
FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
NET_RIGHTS = 0b11

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/zero", "/dev/urandom")
PROCESSES = 64  # more than these a scorer may not start
FILE_BYTES = 1 << 24
SCRATCH_BYTES = 1 << 26
OPEN_FILES = 256

_libc = ctypes.CDLL(None, use_errno=True)


def environment(paths: list[str], scratch: str) -> dict[str, str]:
    """All that a sandbox knows of its run's environment: where Python looks for modules. Its home is its scratch folder."""
    quiet = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONDONTWRITEBYTECODE")}
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": scratch,
        "TMPDIR": scratch,
        "PYTHONPATH": os.pathsep.join(paths),
    } | quiet


def enter_namespaces() -> bool:
    """No network, and a process table of its own from the next child on; False where user namespaces are not allowed."""
    own, group = os.getuid(), os.getgid()
    if own:
        return _unshared() and _write_maps("self", f"{NOBODY} {own} 1", f"{NOBODY} {group} 1", alone=True)
    ready, go = os.pipe()
    helper = os.fork()  # stays outside, where root may map all users; so the scorer can be another one
    if not helper:
        os.close(go)
        process = str(os.getppid())
        mapped = bool(os.read(ready, 1)) and (
            _write_maps(process, "0 0 65536", "0 0 65536", alone=False)
            or _write_maps(process, f"{NOBODY} {own} 1", f"{NOBODY} {group} 1", alone=True)
        )
        os._exit(0 if mapped else 1)
    entered = _unshared()
    if entered:
        os.write(go, b"x")
    os.close(go)
    os.close(ready)
    return os.waitpid(helper, 0)[1] == 0 and entered


def _unshared() -> bool:
    return not _libc.unshare(CLONE_NEWNS | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)


def _write_maps(process: str, users: str, groups: str, alone: bool) -> bool:
    folder = Path("/proc") / process
    try:
        if alone:
            (folder / "setgroups").write_text("deny")
        (folder / "uid_map").write_text(users)
        (folder / "gid_map").write_text(groups)
    except OSError:
        return False
    return True


def bound_scratch(scratch: str) -> None:
    """Put a small file system of memory in the place of the scratch folder, so that what is written there fills no disk."""
    _libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    options = f"size={SCRATCH_BYTES},mode=777".encode()
    _libc.mount(b"tmpfs", scratch.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)


def become_nobody() -> None:
    """From root to a user that owns nothing, with one capability left: to read what root may, which Landlock narrows down."""
    reads = [0]
    if os.getuid() == 0:
        _libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
        with contextlib.suppress(OSError):  # a rootless container may have no other user
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        reads = [1 << CAP_DAC_READ_SEARCH, 1 << CAP_DAC_OVERRIDE, 0]  # a container's root has the second of them only
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if not any(_libc.capset(header, (ctypes.c_uint32 * 6)(keep, keep)) == 0 for keep in reads):
        raise OSError("the capabilities of a sandbox could not be dropped")


def restrict_files(readable: list[str], scratch: str) -> bool:
    """Nothing can be opened but Python, the system's libraries and these paths, and nothing written outside the scratch folder;
    False without Landlock."""
    version = _libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    rights = FS_RIGHTS[max(known for known in FS_RIGHTS if known <= version)]
    handled = (ctypes.c_uint64 * 2)(rights, NET_RIGHTS if version >= 4 else 0)
    ruleset = _libc.syscall(LANDLOCK_CREATE, handled, 16 if version >= 4 else 8, 0)
    if ruleset < 0:
        return False
    for path in {*SYSTEM, *_python(), *readable}:
        _allow(ruleset, path, FS_READ_FILE | FS_READ_DIR | FS_EXECUTE)
    _allow(ruleset, "/dev/null", FS_READ_FILE | FS_WRITE_FILE)
    _allow(ruleset, scratch, rights & ~FS_EXECUTE)
    done = _libc.syscall(LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return done


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _allow(ruleset: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not os.path.isdir(path):
            rights &= FS_READ_FILE | FS_WRITE_FILE
        parent = os.open(path, os.O_PATH)
        _libc.syscall(LANDLOCK_ADD, ruleset, 1, ctypes.byref(_PathBeneath(rights, parent)), 0)
        os.close(parent)


def _python() -> set[str]:
    """Where modules come from. A folder that holds this package is a project, whose other files are not for a scorer."""
    here = Path(__file__).parents[1]
    paths = {sys.prefix, sys.base_prefix, str(here), *site.getsitepackages()}
    return paths | {path for path in sys.path if path and path != "/" and Path(path).resolve() != here.parent}


def die_with_parent() -> None:
    """The kernel kills this process when the one that started it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def limit_resources(memory_bytes: int, processes: int) -> None:
    """Bounds of this process and those that it starts; CPU time follows with each request (`limit_cpu`)."""
    bounds = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        _, hard = resource.getrlimit(kind)
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (bound, bound))


def limit_cpu(seconds: float) -> None:
    """At most this much more CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 2, resource.RLIM_INFINITY))


def most_processes() -> int:
    """The bound on processes. The kernel may count every thread that this user has already, so those come on top."""
    count = PROCESSES
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += len(os.listdir(f"{entry.path}/task"))
    return count
