"""Errors of the compiler. Each message is one sentence: what, name, problem, got, want, where."""


class TilewrightError(Exception):
    """Base of every error that a user, a model or a file can cause while compiling."""


class ShapeError(TilewrightError):
    """An op was given operands whose types do not fit."""


class VerifyError(TilewrightError):
    """A graph breaks a rule of its stage, or a model or checkpoint does not fit its graph."""


class LowerError(TilewrightError):
    """The lowering pipeline cannot turn a graph into kernels."""


class TargetError(TilewrightError):
    """A target lacks what a kernel needs, or its toolchain failed."""
