"""Errors of the runtime. Each message is one sentence: what, name, problem, got, want."""


class ArtifactError(Exception):
    """An artifact cannot be loaded: damaged, of another format, or for another machine."""


class RequestError(Exception):
    """A request is refused, or ended with an error; other requests are not affected."""


class LaunchError(RuntimeError):
    """A kernel refused its arguments, so that the manifest does not fit it, or failed as it ran."""
