"""What a user puts between a call and its operations: a replay would pass it by."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as modules


def interposed() -> str:
    """What wants to see each operation, or each module's call, of the call that is made now; empty = nothing does.

    Such a thing sees none of them where one launch replays all, and Dynamo traces nothing under most of them.
    """
    if torch._C._len_torch_dispatch_stack():
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        return f"the dispatch mode {type(modes[-1]).__name__}" if modes else "a dispatch mode"
    # make_fx(pre_dispatch=True) and export, whose modes are on no stack of those.
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return "a mode before dispatch"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return "a forward hook on all modules"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    return ""
