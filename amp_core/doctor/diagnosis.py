"""A diagnosis: the operation, the cause, and the fix, as data and as text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from amp_core.doctor.findings import Finding
from amp_core.doctor.operations import EQUAL_VALUES, NO_ELEMENTS, NO_TARGETS, ONE_ELEMENT, SINGULAR
from amp_core.doctor.places import called
from amp_core.doctor.values import Range

_Range = Literal["overflow in fp32", "underflow in fp32", "underflow in 16 bits", "gradient norm beyond fp32"]
_Overflow = Literal["overflow in a product", "overflow in an addition", "overflow in a reduction"]
_Overflow16 = Literal["overflow in a cast", "overflow in a function", "loss scale too large"]
_Rounding = Literal["eps lost in 16 bits", "cancellation in 16 bits", "rounding in 16 bits", "position collision"]
_Domain = Literal["division or logarithm of zero", "outside the domain of a function", "nothing left by a mask"]
_Loss = Literal["sigmoid before a logarithm", "16-bit sigmoid before a logarithm", "targets longer than their inputs"]
_Poisoned = Literal["poisoned buffer", "poisoned weight", "poisoned gradient", "poisoned moment", "poisoned tensor"]
_Elsewhere = Literal["poisoned by the optimizer", "training diverges", "bad input", "infinite constant", "not found"]
Cause = Literal[_Range, _Overflow, _Overflow16, _Rounding, _Domain, _Loss, _Poisoned, _Elsewhere]

_OPERATIONS: dict[Cause, str] = {
    "overflow in a product": "mm addmm bmm baddbmm addmv mv dot mul square addcmul linear outer convolution div matmul "
    "convolution_backward _scaled_mm linear_backward prelu _prelu_kernel",
    "overflow in a reduction": "sum nansum mean norm linalg_vector_norm cumsum cumprod prod var var_mean std std_mean "
    "logsumexp logcumsumexp index_add scatter_add index_put trace embedding_dense_backward _foreach_norm cdist "
    "_cdist_forward native_layer_norm",
    "overflow in an addition": "add sub rsub",
    "overflow in a cast": "_to_copy copy",
}
_OVERFLOWS: dict[str, Cause] = {name: cause for cause, names in _OPERATIONS.items() for name in names.split()}
"""What an overflow beyond 16 bits is called; of other operations it is one in a function."""
_BCE = {"bce", "wide bce"}
_LOGARITHMS = {"log", "log2", "log10", "log1p", "xlogy"}
_HAVE_ENDS = {"acos", "asin", "acosh", "atanh", "logit", "erfinv"}
_HAVE_DOMAINS = {*_LOGARITHMS, *_HAVE_ENDS, "sqrt", "rsqrt", "pow"}


_BEFORE: dict[str, Cause] = {"buffer": "poisoned buffer", "weight": "poisoned weight", "argument": "poisoned tensor"}
"""What was not finite from the start, by the first word of its name."""


@dataclass(frozen=True)
class Fix:
    """A change that fixes the window."""

    kind: Literal["override", "code", "data", "none"]
    text: str
    override: str | None = None
    """The override to add to the command line."""
    python: str = ""
    """The same as a line of a program."""
    verified: bool | None = None
    """Whether the window was finite with it; None: not tried, because it changes code or data."""
    steps: int = 1
    """For how many steps training was finite with it: the window, and those after it."""


@dataclass
class Diagnosis:
    """Where the first non-finite value of a window appeared, why, and how to fix it."""

    cause: Cause
    why: str
    op: str = ""
    module: str | None = None
    """Name as in `named_modules()`; None outside the networks."""
    module_class: str = ""
    source: str = ""
    code: str = ""
    phase: Literal["forward", "backward", "before", "step"] = "forward"
    inputs: list[Range] = field(default_factory=list)
    output: Range | None = None
    tensor: str = ""
    """Name of the weight, buffer or batch entry that was non-finite, or too large, from the start."""
    reached: list[str] = field(default_factory=list)
    """Losses and gradients that it made non-finite."""
    fixes: list[Fix] = field(default_factory=list)
    step: int | None = None
    rank: int = 0
    num_ranks: int = 1
    ranks: list[int] = field(default_factory=list)
    """The ranks on which a first non-finite value appeared."""
    amp: str = ""
    loss_scale: float = 1.0
    """0: not known, of a loop that scales its loss by no scaler."""
    scale_that_fits: float | None = None
    """If the loss scale was too large: the largest power of two at which the window is finite."""
    samples: list[int] = field(default_factory=list)
    """Indices of the affected samples in the training data; of rows in the batch of a plain loop."""
    weights: str = ""
    """Which weights the window was rerun with."""
    islands: list[str] = field(default_factory=list)
    """Modules that the fix keeps in fp32."""
    healed: bool = False
    in_python: bool = False
    """The window belongs to another program, which takes no overrides."""

    @property
    def headline(self) -> str:
        """The report as one line."""
        parts = [f"step {self.step}: {self.cause}"]
        parts += [f"{self.op} {'' if self.module is None else 'in '}{called(self.module)}"] if self.op else []
        parts += [self.source] if self.source else []
        parts += [f"try {fix.override}" for fix in self.fixes[:1] if fix.override]
        return ", ".join(parts)

    def diverges(self, why: str) -> None:
        """Make it one of a training that no precision holds: what was to be kept in fp32 is withdrawn."""
        self.cause, self.fixes = "training diverges", [ADVICE["training diverges"]]
        self.islands, self.scale_that_fits = [], None
        self.why += why

    to_dict = dataclasses.asdict
    """Plain values, for JSON."""

    def __str__(self) -> str:
        head = f"step {self.step}: {self.cause}" if self.step is not None else self.cause
        head += f" on rank {self.rank} of {self.num_ranks}" if self.num_ranks > 1 else ""
        lines = [head, "", *(f"  {name:<9}  {text}" for name, text in self._rows() if text), "", f"  {self.why}", ""]
        for fix in self.fixes:
            those = "on this batch" if self.in_python else "from this one on"
            span = f"for {fix.steps} steps {those}" if fix.steps > 1 else "for this window"
            mark = {True: f" (tried: finite {span})", False: " (tried: not enough)", None: ""}
            # Settings are in brackets.
            text = re.sub(r" \((?:optimizer\.lr|\w+=[^()]*)\)", "", fix.text) if self.in_python else fix.text
            change = fix.python if self.in_python else fix.override
            lines += [f"  -> {text}{mark[fix.verified]}", *([f"     {change}"] if change else [])]
        if self.healed:
            lines.append(f"  healed: computed in fp32 from here on: {listed(self.islands)}")
        return "\n".join(lines).rstrip()

    def _rows(self) -> Iterator[tuple[str, str]]:
        when = "after the backward pass" if self.phase == "step" else f"{self.phase} pass"
        yield "operation", self.op and f"{self.op}, {when}"
        has_place = bool(self.op or self.source) or self.module is not None
        if has_place and self.cause not in ("not found", "bad input") and not self.cause.startswith("poisoned"):
            yield "module", called(self.module) + (f" ({self.module_class})" if self.module_class else "")
        yield "source", self.source and self.source + (f"    {self.code}" if self.code else "")
        yield from (("" if i else "input", str(each)) for i, each in enumerate(self.inputs))
        yield "output", "" if self.output is None else str(self.output).removeprefix("output ")
        yield "reached", listed(self.reached, 3)
        scale = f", loss scale {self.loss_scale:g}" if self.loss_scale else ""
        yield "mode", self.amp and f"amp={self.amp}{scale}" + (f"; {self.weights}" if self.weights else "")
        what, of = ("rows", "batch") if self.in_python else ("samples", "training data")
        yield what, f"{listed(self.samples)} of the {of}" if self.samples else ""


def keep_fp32_override(names: Sequence[str]) -> str:
    """The override that makes these modules islands, quoted for a shell."""
    if all(re.fullmatch(r"[A-Za-z_][\w.]*", name) for name in names):
        return f"amp.keep_fp32=[{','.join(names)}]"
    return "'amp.keep_fp32=[" + ",".join(f'"{name}"' for name in names) + "]'"


def cause_of(finding: Finding) -> Cause:
    """The cause of a first non-finite value, from the operation and its result in float64."""
    if not finding.op:
        return _BEFORE.get(finding.tensor.split()[0], "bad input")
    if finding.is_constant:
        return "outside the domain of a function" if "logdet" in finding.place.code else "infinite constant"
    name = finding.op.split(".")[-1].rstrip("_")
    if finding.tensor.endswith("running_var"):
        return "poisoned buffer"
    marks = {kind for kind, _ in finding.marks}
    is_wide_finite = finding.wide is not None and finding.wide < float("inf")
    if "ctc_loss" in name and not finding.backward and not is_wide_finite:
        return "targets longer than their inputs"
    is_bce = name.startswith("binary_cross_entropy") and finding.at_a_pole != NO_ELEMENTS
    if marks & _BCE or is_bce:
        return "16-bit sigmoid before a logarithm" if marks & {"bce", "sigmoid"} else "sigmoid before a logarithm"
    # One that is singular in exact arithmetic need not be so in float64, which rounds, too.
    if finding.at_a_pole and (not is_wide_finite or finding.at_a_pole == SINGULAR):
        if marks & {"sigmoid", "wide sigmoid"} and {name, finding.place.forward.rstrip("_")} & _LOGARITHMS:
            return "16-bit sigmoid before a logarithm" if "sigmoid" in marks else "sigmoid before a logarithm"
        if "eps" not in marks and finding.has_nan and name in _HAVE_DOMAINS:
            return "outside the domain of a function"
        if "eps" in marks:
            return "eps lost in 16 bits"
        return "underflow in fp32" if "wide underflow" in marks else "division or logarithm of zero"
    if finding.only_masks:
        return "nothing left by a mask"
    if finding.wide is not None and math.isnan(finding.wide):
        return "division or logarithm of zero"
    if finding.tensor and finding.output.dtype == "float16":
        return "bad input"
    is_beyond_fp32 = (finding.wide or 0) > torch.finfo(torch.float32).max
    if is_beyond_fp32 or not finding.output.dtype.startswith(("float16", "float8")):  # bfloat16 has the range of fp32
        return "overflow in fp32"
    if "attention" in name or (name == "pow" and not finding.at_a_pole):
        return "overflow in a product"
    return _OVERFLOWS.get(name, "overflow in a function")


_ROUNDED = "A probability was rounded to exactly 0 or 1 ({probability}), so that its logarithm, or the gradient 1/p, "
_ROUNDED += "is infinite."
_VANISHED = "{what} was given a number that is 0 only because of"
_WHY: dict[Cause, str] = {
    "16-bit sigmoid before a logarithm": _ROUNDED,
    "sigmoid before a logarithm": _ROUNDED,
    "eps lost in 16 bits": "An eps that should have kept a number above 0 is itself 0 in 16 bits: {eps}.",
    "underflow in 16 bits": f"{_VANISHED} 16 bits: {{underflow}} is 0 there, not in float64.",
    "underflow in fp32": f"{_VANISHED} 32 bits: {{wide underflow}} is 0 there, not in float64.",
    "cancellation in 16 bits": "{what} was given a difference no larger than the rounding errors of its two numbers in "
    "16 bits ({cancellation}).",
    "targets longer than their inputs": "The loss is infinite by definition where no alignment exists: a sample needs "
    "a frame for each label, and one more between two equal ones.",
    "poisoned weight": "{tensor} was not finite before the window began.",
    "poisoned tensor": "{tensor} was not finite when it got here, and no watched operation made it so: the program "
    "holds it, or it came from numpy, an extension, another thread or process.",
    "infinite constant": "{what} wrote or was given an infinity or NaN of the program, and it reached the loss or the "
    "gradients.",
}
"""The sentence of a cause, with an operation and the texts of its marks."""


def explain(finding: Finding, cause: Cause) -> str:
    """The cause as a sentence."""
    dtype = finding.output.dtype
    limit = torch.finfo(getattr(torch, dtype)).max
    ends = f"ends at {limit:.3g}" if limit > 1e6 else f"ends at {limit:g}"
    what, forward = finding.operator, finding.place.forward.strip("_")
    pass_ = f"the backward pass of {forward}" if forward and finding.backward else what
    marks = dict(sorted(finding.marks))
    if cause in _WHY:
        kinds = ("sigmoid", "wide sigmoid", "bce", "wide bce")
        probability = next((marks[kind] for kind in kinds if kind in marks), "a sigmoid")
        return _WHY[cause].format_map({**marks, "what": what, "tensor": finding.tensor, "probability": probability})
    if finding.is_constant and cause in POLES:  # which torch itself writes
        return "logdet was given a matrix whose determinant is negative."
    if cause in POLES or cause == "rounding in 16 bits":
        at = finding.at_a_pole or (SINGULAR if "linalg" in what else "")
        given = f"was given {at}" if at else "has no finite value for its inputs"
        return f"{what} {given}" + (f" (in {pass_})." if pass_ != what else ".")
    if cause == "nothing left by a mask":
        if what in ("sub", "rsub"):
            such = "as where a recursion begins with -inf, or a sum over nothing is subtracted from what is masked"
            return f"{what} was given infinities of the same sign, whose difference is NaN, {such}."
        such = "as in a row of attention whose keys are all masked"
        beyond = f" Some of them came from {marks['beyond']}, beyond its range." if "beyond" in marks else ""
        return f"Along its dimension {what} got only infinities, {such}.{beyond}"
    if cause == "poisoned buffer" and finding.op:
        return f"{finding.tensor} holds a number below 0, and a variance has none."
    if cause == "bad input" and finding.op:
        return f"{finding.tensor} holds numbers up to {finding.wide:.4g}, and {dtype} {ends}."
    if cause in ("poisoned buffer", "bad input"):
        return _WHY["poisoned weight"].format(tensor=finding.tensor)
    reach = f"of the size {finding.wide:.4g} in float64" if finding.wide is not None else "not finite"
    reach = "infinite in float64, too" if finding.wide == math.inf else reach
    text = f"The result of {pass_} is {reach}, and {dtype} {ends}"
    if cause == "overflow in a cast" and finding.wide is not None:
        text = f"A number of the size {finding.wide:.4g} was cast to {dtype}, which {ends}"
    elif finding.wide is not None and finding.wide <= limit:
        return f"{pass_} is not finite in {dtype}, which {ends}, and {reach}."
    return f"{text}{'; it then became NaN' if finding.has_nan and cause != 'overflow in a cast' else ''}."


def listed(each: Sequence[Any], most: int = 8) -> str:
    """Names, of which an empty one is that of the whole network, or numbers."""
    more = len(each) - most
    return ", ".join(str(one) or "the whole network" for one in each[:most]) + (f" and {more} more" if more > 0 else "")


POLES: set[Cause] = {"division or logarithm of zero", "underflow in fp32", "outside the domain of a function"}

BF16 = Fix("override", "use bf16, which has the range of fp32", "amp=bf16", 'Amp.named("bf16")')
BY_HAND = Fix(
    "code", "the program itself, not autocast, computes this in 16 bits: cast all that it is given to float32"
)
_IN_FP32 = "compute this line, and what leads to it, in fp32"
_WITH_LOGITS = "use binary_cross_entropy_with_logits"
_EARLIER = "start from an earlier checkpoint (resume=<folder>)"
_SLOWER = "lower the learning rate (optimizer.lr)"
_CODE: dict[Cause, str] = {
    "eps lost in 16 bits": "compute this line, what leads to it, and others with its eps in fp32; or choose one that "
    "16 bits hold: 1e-3",
    "division or logarithm of zero": "keep the argument away from 0 and from where it has no value: an eps or a clamp, "
    "in a root and not behind it",
    "outside the domain of a function": "keep the argument where the function has a value: clamp it, off an end with "
    "an infinite slope",
    "underflow in 16 bits": _IN_FP32,
    "cancellation in 16 bits": "compute the difference, and what leads to it, in fp32 (a variance as the mean of "
    "squared deviations)",
    "underflow in fp32": "keep what it divides by away from 0, as by an eps, or compute it by logarithms",
    "rounding in 16 bits": _IN_FP32,
    "targets longer than their inputs": "zero_infinity=True leaves such samples out; or longer inputs, shorter targets",
    "sigmoid before a logarithm": _WITH_LOGITS,
    "16-bit sigmoid before a logarithm": f"{_WITH_LOGITS}, or an fp32 region that holds the sigmoid *and* the loss",
    "nothing left by a mask": "leave one key in every row, or set rows without keys to 0",
    "training diverges": _SLOWER,
    "overflow in fp32": f"if numbers grew in training, {_SLOWER}; else make what leads to this line smaller",
    "poisoned gradient": "optimizer.zero_grad() before the window, also after a step that was skipped",
    "poisoned by the optimizer": f"{_SLOWER}, or repair eps or moments",
    "infinite constant": "write a finite number, or keep what it masks from the loss",
    "overflow in a reduction": "sum in fp32: .float() before it, or dtype=torch.float32",
    "position collision": "compute positions and their products in fp32: inside of autocast(enabled=False)",
}
_DATA: dict[Cause, str] = {
    "poisoned buffer": f"{_EARLIER} or reset the buffer",
    "poisoned weight": f"{_EARLIER}; if it never was finite, initialise it so",
    "poisoned moment": f"{_EARLIER}, or with a new optimizer",
    "poisoned tensor": "make it finite where the program creates, loads or updates it",
    "bad input": "repair or remove the samples",
}
_RANGE: tuple[Cause, ...] = "overflow in a product", "overflow in an addition", "overflow in a cast"
ADVICE: dict[Cause, Fix] = {cause: Fix("code", text) for cause, text in _CODE.items()}
ADVICE |= {cause: Fix("data", text) for cause, text in _DATA.items()}
ADVICE |= dict.fromkeys((*_RANGE, "overflow in a function"), BF16)


_AT = {
    SINGULAR: "add small numbers to the diagonal, or use torch.linalg.lstsq",
    EQUAL_VALUES: "use what does not depend on the vectors, or add small different numbers to the diagonal",
    ONE_ELEMENT: "leave out what has one element alone",
    **dict.fromkeys((NO_ELEMENTS, NO_TARGETS), "leave out what has no elements to average"),
}
"""What to change where an operation has no finite result, by what it was given."""


def advice_for(cause: Cause, finding: Finding) -> Fix | None:
    """What to change, for this operation."""
    if text := _special_advice(cause, finding):
        return Fix("data" if cause == "bad input" else "code", text)
    return ADVICE.get(cause)


def _special_advice(cause: Cause, finding: Finding) -> str | None:
    what, forward = finding.operator, finding.place.forward.strip("_")
    at_a_pole = cause in POLES
    if cause == "underflow in 16 bits" and what in _LOGARITHMS:
        more = "; log_softmax for a softmax" if any("softmax" in origin for _, origin in finding.marks) else ""
        return f"compute this line, and what leads to it, in fp32{more}"
    if cause == "underflow in fp32" and what in _LOGARITHMS:
        return "compute the logarithm without the number: log_softmax, logsumexp, slogdet, sums of logarithms"
    if cause == "overflow in a reduction" and finding.backward:
        return "make the gradient smaller: divide the loss by a constant, such as the number of elements"
    if finding.backward and forward in _HAVE_ENDS and at_a_pole:
        return "keep the argument off the ends of its domain, where the slope is infinite: clamp it"
    if at_a_pole and not finding.is_constant and "det" not in what and finding.at_a_pole in _AT:
        return _AT[finding.at_a_pole]
    if cause == "nothing left by a mask" and what in ("sub", "rsub"):
        return "write a large finite number in place of -inf, or leave something in what is masked"
    if cause == "bad input" and finding.op:  # finite numbers
        return "repair or remove the samples; if their numbers are right, normalise them"
    if "sigmoid before" in cause and not (what.startswith("binary") or {kind for kind, _ in finding.marks} & _BCE):
        region = ", or an fp32 region that holds the sigmoid *and* the logarithm" * cause.startswith("16")
        return f"take the logarithm of the logits: logsigmoid(z) for log(p), logsigmoid(-z) for log(1 - p){region}"
    if finding.is_constant and at_a_pole:
        return "use torch.linalg.slogdet, or a matrix whose determinant is positive"
    if ADVICE.get(cause) is BF16 and (finding.wide or 0.0) > torch.finfo(torch.bfloat16).max:
        return "use a smaller number, such as torch.finfo(x.dtype).min for a mask"
    return None
