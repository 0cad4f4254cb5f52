"""The first process of a bubblewrap box: runs commands for the host, reaps every orphan, ends when the host does.

It runs inside the box as `python -I -S -B`, so it imports C modules and `os` only: its start is most of what a box
costs. The host speaks to it over one SEQPACKET socket. A request is `VERB ID [PORT]`, a reply `ID STATUS`; open files
travel beside them. It is the box's PID 1: when it ends, the kernel kills all other processes of the box.
"""

# ruff: noqa: PTH101, PTH103, PTH104, PTH106, PTH108, PTH120, PTH208
import _ctypes
import _signal  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
import _socket
import errno
import marshal
import os
import resource
import select
import stat
import sys
import time

PR_SET_DUMPABLE = 4
OOM_RISE = 500
CHUNK = 1 << 20
FD_BYTES = 4
PLAIN_FAILURE = 125


def hide_from_agents() -> None:
    """Makes this process impossible to trace or read for commands, which run under the same user id."""
    libc = _ctypes.dlopen(None, os.RTLD_NOW)  # pyright: ignore[reportArgumentType]
    if _ctypes.call_function(_ctypes.dlsym(libc, "prctl"), (PR_SET_DUMPABLE, 0, 0, 0, 0)) != 0:
        raise OSError("prctl(PR_SET_DUMPABLE) failed")


def limit_processes(pids: int, file_bytes: int) -> None:
    """Sets the limits that all commands inherit; 0 means that the host limits it in a better way."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lower(resource.RLIMIT_NOFILE, 16384)
    if pids:
        lower(resource.RLIMIT_NPROC, pids + 1)
    if file_bytes:
        lower(resource.RLIMIT_FSIZE, file_bytes)


def lower(kind: int, value: int) -> None:
    """Lowers one limit; a host that is stricter stays so."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def writable(path: str) -> bool:
    """Whether the file system mounted there may be written to."""
    return not os.statvfs(path).f_flag & os.ST_RDONLY


class Init:
    """The commands now running, and the socket to the host."""

    def __init__(self, control: int, deadline: float) -> None:
        self.control = _socket.socket(fileno=control)
        self.deadline = deadline
        self.commands: dict[int, int] = {}  # pid -> request id
        self.oom = os.open("/proc/self/oom_score_adj", os.O_RDWR if writable("/proc") else os.O_RDONLY)
        self.oom_own = int(os.read(self.oom, 16))
        self.wake, wake_writer = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_writer, False)
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Answers requests until the host is gone or the deadline has passed."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        self.reply(0, 0)
        while (left := self.deadline - time.monotonic()) > 0:
            ready = {fd for fd, _ in poll.poll(min(left, 3600) * 1000 + 1)}
            if self.wake in ready:
                self.drain_wake()
            self.reap()
            if self.control.fileno() in ready and not self.answer():
                return

    def drain_wake(self) -> None:
        try:
            while os.read(self.wake, 4096):
                pass
        except BlockingIOError:
            return

    def reap(self, options: int = os.WNOHANG) -> None:
        """Collects ended processes, ours and orphans, and tells the host how its commands ended."""
        try:
            while True:
                pid, status = os.waitpid(-1, options)
                if pid == 0:
                    return
                if pid in self.commands:
                    self.reply(self.commands.pop(pid), status)
        except ChildProcessError:
            return

    def reply(self, request: int, status: int, fds: tuple[int, ...] = ()) -> None:
        rights = b"".join(fd.to_bytes(FD_BYTES, sys.byteorder) for fd in fds)
        ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if fds else []
        self.control.sendmsg([b"%d %d" % (request, status)], ancillary)

    def answer(self) -> bool:
        """Does one request; False when the host has closed its end."""
        space = _socket.CMSG_SPACE(4 * FD_BYTES)
        data, ancillary, _, _ = self.control.recvmsg(64, space, _socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        rights = b"".join(item[2] for item in ancillary)
        fds = [int.from_bytes(rights[i : i + FD_BYTES], sys.byteorder) for i in range(0, len(rights), FD_BYTES)]
        verb, request, *words = data.split()
        if verb == b"run":
            self.run(int(request), fds)
        elif verb == b"kill":
            self.kill(int(request))
        elif verb == b"enter":
            self.enter(int(request), int(words[0]), fds)
        elif verb == b"listen":
            self.listen(int(request), int(words[0]))
        return True

    def run(self, request: int, fds: list[int]) -> None:
        """Starts a command in a session of its own; its memory is the first to go when memory runs out."""
        os.pwrite(self.oom, b"%d" % min(1000, self.oom_own + OOM_RISE), 0)
        try:
            pid = os.fork()
        except OSError as error:
            os.write(fds[3], b"cannot start a process in the box: %s\n" % reason(error))
            self.reply(request, PLAIN_FAILURE << 8)
        else:
            if pid == 0:
                become(fds)
            self.commands[pid] = request
        finally:
            os.pwrite(self.oom, b"%d" % self.oom_own, 0)
            for fd in fds:
                os.close(fd)

    def enter(self, request: int, groups: int, fds: list[int]) -> None:
        """Joins control groups; then takes the file of its own memory score, open for writing, where there is one more.

        A thread that moves itself need not wait, as one that moves another must, until no process forks or ends.
        """
        error = 0
        for fd in fds[:groups]:
            try:
                os.write(fd, b"0")
            except OSError as refused:
                error = refused.errno or errno.EIO
            os.close(fd)
        for fd in fds[groups:]:
            os.close(self.oom)
            self.oom = fd
        self.reply(request, error)

    def kill(self, request: int) -> None:
        """Kills every other process of the box and waits until they are gone."""
        try:
            while True:
                os.kill(-1, _signal.SIGKILL)
                self.reap(0)
        except ProcessLookupError:
            self.reap()
        self.reply(request, 0)

    def listen(self, request: int, port: int) -> None:
        """Sends the host a listening socket of this box's own network."""
        sock = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        try:
            sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            sock.listen(128)
        except OSError as error:
            self.reply(request, error.errno or errno.EIO)
        else:
            self.reply(request, 0, (sock.fileno(),))
        finally:
            sock.close()


def become(fds: list[int]) -> None:
    """Turns this fresh child into the command that the host asked for; never returns."""
    status = PLAIN_FAILURE
    try:
        os.setsid()
        request = marshal.loads(read_all(fds[0]))
        for target, fd in enumerate(fds[1:]):
            os.dup2(fd, target)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        _signal.set_wakeup_fd(-1)
        for number in (_signal.SIGINT, _signal.SIGCHLD, _signal.SIGPIPE, _signal.SIGXFSZ):
            _signal.signal(number, _signal.SIG_DFL)
        status = ACTIONS[request[0]](*request[1:])
    except OSError as error:
        status = error.errno or PLAIN_FAILURE
    finally:
        os._exit(status)


def read_all(fd: int) -> bytes:
    """All bytes of a file, from its start."""
    return os.pread(fd, os.fstat(fd).st_size, 0)


def reason(error: OSError) -> bytes:
    """The system's words for an error."""
    return os.strerror(error.errno or 0).encode()


def run(argv: list[bytes], env: dict[bytes, bytes], cwd: bytes) -> int:
    """Becomes the program; where it cannot be started, says so as a shell does: 127 not found, 126 otherwise."""
    try:
        os.chdir(cwd)
        failure = execute(argv, env)
    except OSError as error:
        failure = error
    os.write(2, b"%s: %s\n" % (failure.filename or argv[0], reason(failure)))
    return 127 if isinstance(failure, FileNotFoundError) else 126


def execute(argv: list[bytes], env: dict[bytes, bytes]) -> OSError:
    """Looks the program up in PATH and becomes it; otherwise returns the most telling error."""
    failure: OSError = FileNotFoundError(errno.ENOENT, "not found", argv[0])
    folders = [b""] if b"/" in argv[0] else env.get(b"PATH", b"").split(b":")
    for folder in folders:
        file = folder + b"/" + argv[0] if folder else argv[0]
        try:
            os.execve(file, argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            failure = error
    return failure


def put(path: bytes, mode: int) -> int:
    """Writes standard input to a file in one step; a link or folder of that name is replaced, not followed."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    draft = b"%s/.lego-put-%d" % (folder, os.getpid())
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        while chunk := os.read(0, CHUNK):
            write_all(fd, chunk)
        os.fchmod(fd, mode)
        remove_folder(path)
        os.rename(draft, path)
    except OSError:
        os.unlink(draft)
        raise
    return 0


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def remove_folder(path: bytes) -> None:
    """Removes a folder with all it holds; leaves anything else alone."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    os.chmod(path, 0o700)
    for name in os.listdir(path):
        child = path + b"/" + name
        if stat.S_ISDIR(os.lstat(child).st_mode):
            remove_folder(child)
        else:
            os.unlink(child)
    os.rmdir(path)


def get(path: bytes, max_bytes: int) -> int:
    """Writes a regular file to standard output; EFBIG above `max_bytes`."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return errno.EISDIR
    left = max_bytes
    while chunk := os.read(fd, CHUNK):
        left -= len(chunk)
        if left < 0:
            return errno.EFBIG
        write_all(1, chunk)
    return 0


ACTIONS = {"run": run, "put": put, "get": get}


def main() -> None:
    """Arguments: seconds to live, the limits on processes and file bytes (0: none), the socket's number."""
    deadline_s, pids, file_bytes, control = sys.argv[1:]
    init = Init(int(control), time.monotonic() + float(deadline_s))
    limit_processes(int(pids), int(file_bytes))
    hide_from_agents()
    init.serve()
    os._exit(0)  # the host waits for this end, and Python would take down its objects one by one


if __name__ == "__main__":
    main()
