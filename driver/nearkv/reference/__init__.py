"""The torch reference of the numerics contract: the answer that every device's answer must equal.

`decode_attention` is the whole of it; `merge`, `finish` and `log_sum_exp` work on its partial results, and
`page_summaries` and `select_pages` say which pages it may leave out. It imports torch and `nearkv_hw.abi` and
nothing else, and runs unchanged on CPU and CUDA.
"""

from nearkv.reference.attention import decode_attention
from nearkv.reference.binned import State
from nearkv.reference.finish import finish, log_sum_exp
from nearkv.reference.pages import PageSelection, PageSummaries, page_summaries, select_pages
from nearkv.reference.partial import Partial, merge
from nearkv.reference.score import score_factor

__all__ = [
    "PageSelection",
    "PageSummaries",
    "Partial",
    "State",
    "decode_attention",
    "finish",
    "log_sum_exp",
    "merge",
    "page_summaries",
    "score_factor",
    "select_pages",
]
