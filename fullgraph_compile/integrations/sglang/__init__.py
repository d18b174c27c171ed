"""The plugin that lets SGLang's ``full`` prefill graphs run the compiled body.

Switched on by ``FULLGRAPH_COMPILE_SGLANG=1``; see docs/sglang.md.  ``register`` is what SGLang calls in each of its
processes.  Nothing is imported here, so that SGLang pays nothing for a plugin that is off.
"""

from __future__ import annotations


def register() -> None:
    """Register the plugin's hooks with SGLang, if the environment asks for it.

    SGLang logs whatever a plugin raises and goes on without it, so what must not go unseen ends the process.

    Raises:
        SystemExit: a variable is not valid; or, under ``strict``, the plugin cannot be installed.
    """
    import os

    from fullgraph_compile.integrations.sglang.settings import SWITCH, BadSetting, Settings

    try:
        settings = Settings.read(os.environ)
    except BadSetting as error:
        raise SystemExit(f"fullgraph_compile: {error}") from None
    if not settings.on:
        return
    from fullgraph_compile.report import log

    try:
        from fullgraph_compile.integrations.sglang.plugin import install

        install(settings)
    except Exception as error:
        if settings.strict:
            raise SystemExit(f"fullgraph_compile: {error} ({SWITCH}=strict)") from error
        log.error("%s; SGLang runs without the plugin", error)
