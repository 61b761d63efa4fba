"""What code finds in the sandbox, should it ever run there: each attempt, and that it came to nothing."""

import errno
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from serve.reward_function import RewardConfig, RewardFunction
from serve.sandbox import Sandbox, isolation
from serve.sandbox.keeper import confine

# Each body runs as a reward function; 1.0 would mean that it got what it wanted.
ATTEMPTS = {
    "read a file of this user": "return float(bool(open(SECRET).read()))",
    "read the run's environment": "import os; return float('API_KEY' in os.environ)",
    "read another process's environment": "return float(b'API_KEY' in open(f'/proc/{PID}/environ', 'rb').read())",
    "list the run's folder": "import os; return float(bool(os.listdir(os.path.dirname(SECRET))))",
    "write beside itself": "open(FOLDER + '/written', 'w').write('x'); return 1.0",
    "write to /tmp": "open('/tmp/written-by-a-scorer', 'w').write('x'); return 1.0",
    "write to the home folder": "open(HOME + '/written', 'w').write('x'); return 1.0",
    "change a file's mode": "import os; os.chmod(SECRET, 0o777); open(SECRET).read(); return 1.0",
    "make a folder": "import os; os.mkdir(FOLDER + '/made'); return 1.0",
    "remove a file": "import os; os.remove(SECRET); return 1.0",
    "make a link": "import os; os.symlink(SECRET, FOLDER + '/link'); return 1.0",
    "connect over TCP": "import socket; socket.create_connection(('127.0.0.1', PORT), 2); return 1.0",
    "send over UDP": "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', PORT)); return 1.0",
    "listen": "import socket; s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); raise OSError",
    "look up a name": "import socket; socket.getaddrinfo('localhost.example', 80); return 1.0",
    "signal the run": "import os; os.kill(PID, 0); return 1.0",
    "signal everyone": "import os, signal; os.kill(-1, signal.SIGKILL); raise OSError",
    "become root": "import os; os.setuid(0); return 1.0",
    "mount": "import ctypes, os; r = ctypes.CDLL(None).mount(b'none', b'/mnt', b'tmpfs', 0, 0); raise OSError(r) if r else 1",
    "more namespaces": "import ctypes; r = ctypes.CDLL(None).unshare(0x00020000); raise OSError(r) if r else 1",
    "trace the keeper": "import ctypes; r = ctypes.CDLL(None).ptrace(16, 1, 0, 0); raise OSError(r) if r else 1",
    "fill memory": "x = bytearray(64 << 30); return 1.0",
    "a thousand processes": "import os, time\nfor _ in range(1000):\n  os.fork() or (time.sleep(30), os._exit(0))\nreturn 1.0",
    "a large file": "import os, tempfile; f = open('/dev/shm/x', 'wb'); f.write(bytes(1 << 28)); return 1.0",
    "fill the disk": "import tempfile\nfor _ in range(64):\n  open(tempfile.mktemp(), 'wb').write(bytes(1 << 23))\nreturn 1.0",
    "run its own program": "import os, shutil\nf = os.environ['HOME'] + '/t'\nshutil.copy('/bin/true', f)\nos.chmod(f, 0o700)\n"
    "return float(os.spawnl(os.P_WAIT, f, 't') == 0)",
    "wait for input": "return float(bool(input()))",
    "read its own requests": "import sys; return float(bool(sys.stdin.read()))",
    "end the worker": "import os; os._exit(0)",
    "crash": "import ctypes; ctypes.string_at(0)",
    "recurse": "f = lambda: f(); return f()",
    "print for ever": "import sys\nfor _ in range(10**6): sys.stdout.write('x' * 100)\nraise OSError",
}


@pytest.fixture(scope="module")
def secret(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("run") / "key"
    file.write_text("secret")
    return file


@pytest.fixture(scope="module")
def box():
    os.environ["API_KEY"] = "secret"
    with Sandbox(timeout_s=4.0, memory_gib=2.0) as box:
        box.start()
        if box.missing:
            pytest.skip(f"this machine cannot keep {' and '.join(box.missing)} from a scorer: no user namespaces or no Landlock")
        yield box
    del os.environ["API_KEY"]


@pytest.fixture(scope="module")
def listener():
    """A port where someone listens, over TCP and UDP; nothing may arrive."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        socket.create_connection(("127.0.0.1", port), 2).close()  # this process could
        yield port
        tcp.accept()[0].close()
        for one in (tcp, udp):
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1) if one is udp else one.accept()


def function(folder: Path, body: str, **values) -> RewardFunction:
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    lines += ["def score(data_source, solution_str, ground_truth, extra_info):", *(f"    {line}" for line in body.split("\n"))]
    (folder / "mine.py").write_text("\n".join(lines))
    read = RewardFunction.read(RewardConfig(str(folder / "mine.py"), "score", "verl"))
    assert read is not None
    return read


pytestmark = pytest.mark.slow

ITEM = {"data_source": "d", "response": "r", "ground_truth": "t", "extra_info": {}}


@pytest.mark.parametrize("body", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_an_attempt_comes_to_nothing(box, secret, listener, tmp_path, body):
    own = function(tmp_path, body, SECRET=str(secret), FOLDER=str(tmp_path), PID=os.getpid(), PORT=listener, HOME=str(Path.home()))
    (found,) = box.score(own, [ITEM])
    assert found == 0.0 or isinstance(found, str), found
    assert secret.read_text() == "secret"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine.py"]


def test_without_namespaces_landlock_and_limits_remain(secret, listener, tmp_path, monkeypatch):
    """What a container without user namespaces gets: the warning names what is missing, files and TCP are still out of reach."""
    monkeypatch.setattr(isolation, "enter_namespaces", lambda: False)
    child = os.fork()
    if not child:
        processes = isolation.most_processes()
        outcome = [confine({"readable": [], "scratch": str(tmp_path)}) == ["network", "processes"]]
        isolation.limit_resources(2 << 30, processes)
        for attempt in (
            secret.read_text,
            lambda: Path("/tmp/x").write_text("x"),
            lambda: socket.create_connection(("127.0.0.1", listener)),
        ):
            try:
                attempt()
                outcome.append(False)
            except OSError as error:
                outcome.append(error.errno == errno.EACCES)
        os._exit(0 if all(outcome) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_no_capability_is_left_but_to_read(tmp_path):
    body = "import ctypes\nh, c = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\nctypes.CDLL(None).capget(h, c)\n"
    body += "return float(bool(c[1] & ~0b110 or c[2] or c[4] or c[5]))"
    with Sandbox(timeout_s=4.0) as own:
        assert own.score(function(tmp_path, body), [ITEM]) == [0.0]


def test_grandchildren_die_with_the_kill(box, tmp_path):
    """Even those that leave the worker's group and session."""
    mark = f"sleep 9{os.getpid()}"
    body = f"import subprocess, time\nsubprocess.Popen({mark.split()!r}, start_new_session=True)\ntime.sleep(60)"
    with Sandbox(timeout_s=1.0) as own:
        (found,) = own.score(function(tmp_path, body), [ITEM])
        assert found == "timeout: no score within 1 s"
        assert not running(mark)


def test_everything_ends_with_the_sandbox_and_with_its_owner(box, tmp_path):
    mark = f"sleep 8{os.getpid()}"
    body = f"import subprocess\nsubprocess.Popen({mark.split()!r}, start_new_session=True)\nreturn 1.0"
    box = Sandbox(timeout_s=4.0)
    assert box.score(function(tmp_path, body), [ITEM]) == [1.0]
    assert running(mark)
    box.close()
    assert not running(mark)


def running(mark: str) -> bool:
    """Whether a process with this command line is there, a moment later too."""
    for _ in range(20):
        found = subprocess.run(["pgrep", "-f", mark], capture_output=True, text=True).stdout.split()
        if not found:
            return False
        time.sleep(0.1)
    return True


def test_an_opt_out_may_do_what_the_run_may(secret, tmp_path):
    body = "import os; return float(open(SECRET).read() == 'secret' and bool(os.environ))"
    with Sandbox(timeout_s=4.0, isolated=False) as own:
        assert own.score(function(tmp_path, body, SECRET=str(secret)), [ITEM]) == [1.0]
        assert own.missing == []
