"""What a call would run, and why: what ``dispatch.choose`` decided, and what every other strategy and kernel says of the same."""

from dataclasses import dataclass

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Kernel, Problem
from jax_core.options import Options
from jax_core.request.dispatch import KERNELS, STRATEGIES, kernels_reasons, strategies_reasons
from jax_core.request.preferences import why_these_kernels
from jax_core.strategies.contract import RingSpec, Strategy
from jax_core.strategies.transfers.traffic import Traffic, sizes

_NOTHING = Traffic(0, 0)
_COULD = "possible, by its name"


@dataclass(frozen=True)
class Explanation:
    """What a call runs on this rank; ``print`` it.

    ``ranks``: how many share the sequence; 1 also for a mesh whose dimension of the ring has one rank, as in (2, 1) for (1, 2).
    ``strategy``, ``kernel``: their names; "nothing to compute" and None where the batch or a sequence is empty; the kernel is None
    too where the strategy has its own. ``why``: where the kernel's place in the order of "auto" comes from, or that the call names
    it. ``fwd_params``, ``bwd_params``: the kernel's tiles. ``strategies``, ``kernels``: for every alternative the reason it was
    refused, or None. ``forward``, ``backward``: bytes that this rank sends, and holds at once beside operands and results;
    ``given``: bytes of q, k, v, the output and the LSE. Biases, masks and ids are not counted, nor what a kernel takes for itself
    and the programs' own constants: memory is an estimate, what is sent is exact.
    """

    strategy: str
    kernel: str | None
    why: str
    fwd_params: FwdParams
    bwd_params: BwdParams
    strategies: dict[str, str | None]
    kernels: dict[str, str | None]
    forward: Traffic
    backward: Traffic
    given: int
    ranks: int

    @property
    def sentence(self) -> str:
        """What computes the call, over how many ranks."""
        if self.strategy == "nothing to compute":
            return "Nothing is computed: the batch or a sequence is empty."
        over = "on one rank, which holds the whole sequence" if self.ranks == 1 else f"over {self.ranks} ranks"
        return f"Attention is computed by {_by(self.strategy, self.kernel)}, {over}."

    def __str__(self) -> str:
        shared = "the whole sequence is here" if self.ranks == 1 else "each has a part of the sequence"
        lines = [self.sentence, f"ranks     {self.ranks} ({shared})", f"strategy  {self.strategy}"]
        lines.append(f"kernel    {self.kernel or 'its own'} ({self.why})")
        for name, params in (("forward", self.fwd_params), ("backward", self.bwd_params)):
            set_ = ", ".join(f"{field} {value}" for field, value in vars(params).items() if value is not None)
            lines += [f"{name:9} {set_}"] if set_ else []
        lines += [f"other strategies: {_others(self.strategies)}", f"other kernels: {_others(self.kernels)}"]
        lines.append(f"sends     {_mib(self.forward.sent)} forward, {_mib(self.backward.sent)} backward, from this rank")
        memory = f"{_mib(self.forward.held)} forward, {_mib(self.backward.held)} backward"
        return "\n".join([*lines, f"memory    about {memory}, beside {_mib(self.given)} of q, k, v, output and LSE"])


def explanation_of(options: Options, spec: RingSpec) -> Explanation:
    """What was decided for these options, in words and figures, and the others' answers."""
    problem, strategy, kernel = spec.problem, spec.strategy, spec.kernel
    params, (name, chosen) = (spec.fwd_config.params, spec.bwd_config.params), _names(strategy, kernel)
    if name is None:
        return Explanation(
            "nothing to compute", None, "empty", *params, {}, {}, _NOTHING, _NOTHING, _operand_bytes(problem), problem.size
        )
    named = options.platform not in (None, "auto") or (options.cfg is not None and options.cfg.platform != "auto")
    of_kernels = {} if kernel is None else kernels_reasons(options, problem, strategy)
    return Explanation(
        strategy=name,
        kernel=chosen,
        why="named by the call" if named else why_these_kernels(strategy.kernel_problem(problem)),
        fwd_params=params[0],
        bwd_params=params[1],
        strategies={other: why for other, why in strategies_reasons(options, problem).items() if other != name},
        kernels={other: why for other, why in of_kernels.items() if other != chosen},
        forward=strategy.traffic(problem, backward=False) if problem.size > 1 else _NOTHING,
        backward=strategy.traffic(problem, backward=True) if problem.size > 1 else _NOTHING,
        given=_operand_bytes(problem),
        ranks=problem.size,
    )


def taken(spec: RingSpec) -> str:
    """The strategy and the kernel of a spec, in words."""
    strategy, kernel = _names(spec.strategy, spec.kernel)
    return "nothing to compute" if strategy is None else _by(strategy, kernel)


def _names(strategy: Strategy, kernel: Kernel | None) -> tuple[str | None, str | None]:
    """No strategy where there is nothing to compute, and no kernel where the strategy has its own."""
    of_strategy = next((name for name, other in STRATEGIES.items() if other is strategy), None)
    return of_strategy, next((name for name, other in KERNELS.items() if other is kernel), None)


def _by(strategy: str, kernel: str | None) -> str:
    return f"the {strategy} strategy with {'its own kernel' if kernel is None else f'the {kernel} kernel'}"


def _operand_bytes(problem: Problem) -> int:
    nbytes = sizes(problem)
    return nbytes.queries + nbytes.keys + nbytes.out + nbytes.rows


def _others(reasons: dict[str, str | None]) -> str:
    return "".join(f"\n  {name:12} {_COULD if why is None else why}" for name, why in reasons.items()) or " none"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
