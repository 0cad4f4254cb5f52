"""A seccomp filter as BPF bytes: refuses the kernel interfaces that no agent needs and exploits like.

It is a second line: the box has no capabilities and no nested user namespaces without it too. x86_64 only.
"""

import errno
import functools
import struct

ARCH_X86_64 = 0xC000003E
X32_BIT = 0x40000000
OFFSET_NUMBER, OFFSET_ARCH, OFFSET_ARGS = 0, 4, 16
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000

NAMESPACE_FLAGS = 0x7E020000
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206

DENIED = {
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "move_mount": 429, "open_tree": 428,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "unshare": 272, "setns": 308,
    "add_key": 248, "request_key": 249, "keyctl": 250,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438, "kcmp": 312, "process_madvise": 440,
    "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "open_by_handle_at": 304, "swapon": 167, "swapoff": 168, "reboot": 169, "acct": 163, "syslog": 103,
    "quotactl": 179, "iopl": 172, "ioperm": 173, "vhangup": 153, "lookup_dcookie": 212,
}  # fmt: skip

DENIED_ARGUMENTS = (
    (101, 0, PTRACE_ATTACH),  # ptrace: tracing one's own child stays possible
    (101, 0, PTRACE_SEIZE),
    (16, 1, TIOCSTI),  # ioctl: typing into the terminal of somebody else
    (16, 1, TIOCLINUX),
)
CLONE, CLONE3 = 56, 435


@functools.cache
def filter_bytes(machine: str) -> bytes | None:
    """The filter for `--seccomp`; None where the machine (as `os.uname` names it) has none."""
    return b"".join(instructions()) if machine == "x86_64" else None


def instructions() -> list[bytes]:
    """Checks the architecture, then one comparison per refused call; everything else is allowed."""
    program = [one(LOAD, OFFSET_ARCH), one(JUMP_EQUAL, ARCH_X86_64, 1, 0), refuse(errno.ENOSYS)]
    program += [one(LOAD, OFFSET_NUMBER), one(JUMP_GREATER_EQUAL, X32_BIT, 0, 1), refuse(errno.ENOSYS)]
    for number in DENIED.values():
        program += [one(JUMP_EQUAL, number, 0, 1), refuse(errno.EPERM)]
    # clone3 hides its flags behind a pointer: answering ENOSYS makes C libraries fall back to clone.
    program += [one(JUMP_EQUAL, CLONE3, 0, 1), refuse(errno.ENOSYS)]
    program += on_argument(CLONE, 0, JUMP_ANY_BIT, NAMESPACE_FLAGS)
    for number, argument, value in DENIED_ARGUMENTS:
        program += on_argument(number, argument, JUMP_EQUAL, value)
    return [*program, one(RETURN, ALLOW)]


def on_argument(number: int, argument: int, test: int, value: int) -> list[bytes]:
    """Refuses one call where the low half of an argument passes a test; leaves the call number loaded."""
    return [
        one(JUMP_EQUAL, number, 0, 4),
        one(LOAD, OFFSET_ARGS + 8 * argument),
        one(test, value, 0, 1),
        refuse(errno.EPERM),
        one(LOAD, OFFSET_NUMBER),
    ]


def refuse(error: int) -> bytes:
    return one(RETURN, ERRNO | error)


def one(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One BPF instruction."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
