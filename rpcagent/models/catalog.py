"""The models by the name of their provider.

Knows: which providers there are and how to make each at its first use, so that start-up imports none of them; and that
what a model asks for is checked against the tool's schema before it is recorded. Does not know: how any of them is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio

from rpcagent.errors import InvalidParams
from rpcagent.models.arguments import Arguments
from rpcagent.runs.definition import ModelSettings
from rpcagent.runs.events import Trouble
from rpcagent.runs.instants import LONGEST_MS
from rpcagent.runs.outcomes import Failed, Lost, ModelReply, NotDone
from rpcagent.runs.ports import Model, ModelRequest


def _scripted() -> Model:
    from rpcagent.models.scripted import ScriptedModel

    return ScriptedModel()


def _openai() -> Model:
    from rpcagent.models.openai import OpenAiModel

    return OpenAiModel()


class Catalog:
    """The `Model` port over all providers; each is made once, at the first request that names it.

    `providers` adds to, or replaces, the built-in ones: name -> factory. `on_fault` gets every exception that a provider
    raised; the run is told its class name only.
    """

    def __init__(
        self,
        providers: Mapping[str, Callable[[], Model]] | None = None,
        on_fault: Callable[[Exception, ModelRequest], None] | None = None,
    ) -> None:
        self._factories: dict[str, Callable[[], Model]] = {
            "openai": _openai,
            "scripted": _scripted,
            **(providers or {}),
        }
        self._models: dict[str, Model] = {}
        self._on_fault = on_fault
        self._arguments = Arguments()

    def register(self, name: str, factory: Callable[[], Model]) -> None:
        """Adds a provider. Raises ValueError where the name is taken."""
        if name in self._factories:
            raise ValueError(f"the provider {name!r} exists")
        self._factories[name] = factory

    def check(self, settings: ModelSettings, path: str = "$.model") -> None:
        """Raises InvalidParams where a run with these settings could never get an answer."""
        if settings.provider not in self._factories:
            raise InvalidParams(self._unknown(settings.provider), path=f"{path}.provider")
        if not 1 <= settings.timeout_ms <= LONGEST_MS:
            raise InvalidParams(f"a time limit is 1 to {LONGEST_MS} ms", path=f"{path}.timeoutMs")
        if not 0 <= settings.retry_for_ms <= LONGEST_MS:
            raise InvalidParams(f"0 to {LONGEST_MS} ms", path=f"{path}.retryForMs")
        if settings.script:
            from rpcagent.models.scripted import validate_script

            validate_script(settings.script, f"{path}.script")
        if settings.provider == "openai":
            from rpcagent.models.endpoint import check_endpoint

            check_endpoint(settings, path)

    async def complete(
        self, request: ModelRequest, emit: Callable[[str], None]
    ) -> ModelReply | NotDone | Failed | Lost:
        """Asks the provider once, for at most `timeout_ms`. A model call touches nothing outside, so a time-out is NotDone."""
        settings = request.definition.model
        factory = self._factories.get(settings.provider)
        if factory is None:
            return Failed(error=Trouble(kind="unknown_provider", message=self._unknown(settings.provider)))
        try:
            model = self._models.get(settings.provider)
            if model is None:
                model = self._models[settings.provider] = factory()
            with anyio.move_on_after(settings.timeout_ms / 1_000):
                outcome = await model.complete(request, emit)
                if isinstance(outcome, ModelReply):
                    return self._arguments.checked(
                        request.definition, outcome, lambda error: self._fault(error, request)
                    )
                return outcome
        except Exception as error:  # noqa: BLE001  (no foreign exception crosses a port)
            self._fault(error, request)
            return Failed(error=Trouble(kind="crashed", message=f"The provider raised {type(error).__name__}."))
        return NotDone(error=Trouble(kind="timeout", message=f"No answer within {settings.timeout_ms} ms."))

    async def aclose(self) -> None:
        """Closes what the providers hold open."""
        for model in self._models.values():
            close = getattr(model, "aclose", None)
            if close is not None:
                await close()

    def _fault(self, error: Exception, request: ModelRequest) -> None:
        if self._on_fault is not None:
            self._on_fault(error, request)

    def _unknown(self, name: str) -> str:
        return f"there is no model provider {name!r}; there are: {', '.join(sorted(self._factories))}"
