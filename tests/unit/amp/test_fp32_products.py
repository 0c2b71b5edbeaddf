"""The switches of the process for fp32 products are held during a block and put back, in torch's old and new names."""

import subprocess
import sys

STATE = """
def state():
    b = torch.backends
    found = [part.fp32_precision for part in (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul)]
    for read in (lambda: torch.backends.cuda.matmul.allow_tf32, lambda: torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision):
        try:
            found.append(read())
        except RuntimeError:
            found.append("mixed")
    return found
"""

USERS = {
    "nothing set": "",
    "the old names, on": "torch.backends.cuda.matmul.allow_tf32 = True",
    "the old names, off": "torch.backends.cuda.matmul.allow_tf32 = False; torch.backends.cudnn.allow_tf32 = False",
    "set_float32_matmul_precision": "torch.set_float32_matmul_precision('high')",
    "the new names": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "the new names, apart": "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
}


CASE = """
before = state()
for _ in range(2):
    with Fp32Products(tf32):
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.backends.cudnn.allow_tf32 is tf32
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is tf32
after = state()
exact = {"none", "ieee"}  # two words for the same
assert all(a == b or {a, b} <= exact for a, b in zip(before[:4], after[:4])), (before, after)
assert "mixed" in before or after[4:] == before[4:], (before, after)
"""


def test_switches_are_set_inside_and_put_back() -> None:
    """Each case in a process of its own, forked from one that has torch: the switches are global, and mixing their names is an error."""
    script = f"""
import os, torch
from halfstep.amp.autocast import Fp32Products
{STATE}
failed = []
for user in {list(USERS.values())!r}:
    for tf32 in (True, False):
        child = os.fork()
        if child == 0:
            try:
                exec(user)
                exec({CASE!r})
            except BaseException:
                import traceback; traceback.print_exc(); os._exit(1)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            failed.append((user, tf32))
assert not failed, failed
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
