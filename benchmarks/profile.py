"""Where the seconds of a GRPO step go: the fixed work of grpo_step.py, each phase by class of operation.

    python benchmarks/profile.py [--packing none|prefix] [--remat save_all|none|...] [--unroll] [--repeats 5]
        [--rows 30] [--threads 1] [--out FILE]

It runs each phase under JAX's profiler, and reads from the HLO text what each compiled operation computes and moves.
The seconds of an operation are a mean over the runs. Where operations run beside each other, each gets an equal part of
the time. So what another process of the machine takes is in them, and a quiet machine is needed. Prints a table of
the classes of each phase, one of the programs, such as prefill and decode, and one of the slowest operations, in
Markdown. The peak is measured before and after; where a share of it is above 100 %, the machine was busy. The code is
in step_profile.py.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    import step_profile

    step_profile.main()
else:
    # cProfile imports the module of this name in the standard library, and finds this file where benchmarks/ is first.
    file = Path(sysconfig.get_path("stdlib")) / "profile.py"
    spec = importlib.util.spec_from_file_location("profile", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["profile"] = module
