"""Cases whose position ids are anywhere in the range of int32, so that a distance may need 33 bits."""

import numpy as np
from attention_cases import CAUSAL, SLOPES, Case

LEAST, GREATEST = -(2**31), 2**31 - 1
_NEAR = (-9, -3, -1, 0, 4, 11)  # distinguished by a window or chunk of 9
_IDS = [LEAST + 12 + i for i in _NEAR] + [GREATEST - 12 + i for i in _NEAR] + [*_NEAR, LEAST, GREATEST]


def _anywhere(rng: np.random.Generator, case: Case) -> np.ndarray:
    return np.stack([rng.choice(_IDS, case.whole_queries) for _ in range(case.batch)]).astype(np.int32)


_SMALL_SLOPES = {"alibi_slopes": lambda rng, case: SLOPES["alibi_slopes"](rng, case) * 2.0**-31}
_IDS_AND_SLOPES = {"q_position_ids": _anywhere} | _SMALL_SLOPES
FAR = {
    case.name: case
    for case in (
        Case("far, causal window", ring=2, options=CAUSAL | {"sliding_window": 9}, arrays={"q_position_ids": _anywhere}),
        Case("far, window of two sides", ring=2, options={"sliding_window": (9, 4)}, arrays={"q_position_ids": _anywhere}),
        Case("far, widest window", options={"sliding_window": GREATEST}, arrays={"q_position_ids": _anywhere}),
        Case("far, chunks", ring=2, layout="striped", options={"chunk_size": 9}, arrays={"q_position_ids": _anywhere}),
        Case("far, slopes", ring=2, arrays=_IDS_AND_SLOPES),
    )
}
