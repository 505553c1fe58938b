"""A callback for transformers' Trainer that compares a run with the recommendation."""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import TrainerCallback as _Callback

from bexp.model_setup import device_name, versions
from bexp.recommendation import Recommendation, Source

_LOGGER = logging.getLogger(__name__)
_WARM_UP_STEPS = 3
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class RunReport:
    """What a run reached on this device, without its first steps. Bytes are null if the device does not count them."""

    tokens_per_second: float
    peak_bytes: int | None
    peak_reserved_bytes: int | None
    steps: int
    micro_batch_size: int
    seconds: float
    device_name: str
    versions: dict[str, str]


class TrainerCallback(_Callback):
    """Compares tokens/s and peak memory with the recommendation, and logs both when training ends.

    Tokens are counted from the Trainer's batches, with `seq_length` tokens per sequence (default: the
    recommendation's). The first three steps are left out because kernels are built in them. Evaluations and
    checkpoints are left out as well. If `service` is set (its URL), the report is posted to
    `POST /v1/explorations/{id}/run-reports`. A service that does not answer costs at most five seconds, and the
    failure is logged. Only the first process reports.
    """

    def __init__(
        self,
        recommendation: Source | Recommendation,
        *,
        seq_length: int | None = None,
        service: str | None = None,
        token: str | None = None,
        exploration_id: str | None = None,
    ) -> None:
        self.recommendation = Recommendation.read(recommendation)
        self.report: RunReport | None = None
        self._seq_length = seq_length or self.recommendation.seq_length
        self._service = service.rstrip("/") if service else None
        self._token = token
        self._exploration_id = exploration_id or self.recommendation.exploration_id
        self._steps = 0
        self._counted = 0
        self._paused = 0.0
        self._begun: float | None = None
        self._last_end = 0.0
        self._interrupted = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start counting from zero."""
        self._steps = self._counted = 0
        self._paused, self._begun, self._interrupted = 0.0, None, False
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the time of an evaluation or a checkpoint since the last step out."""
        if self._begun is not None and self._interrupted:
            self._paused += time.monotonic() - self._last_end
        self._interrupted = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a step."""
        self._steps += 1
        if self._steps == _WARM_UP_STEPS:
            _wait()
            self._begun = time.monotonic()
        elif self._steps > _WARM_UP_STEPS:
            self._counted += 1
        self._last_end = time.monotonic()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note that an evaluation ran since the last step."""
        self._interrupted = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note that a checkpoint was written since the last step."""
        self._interrupted = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log what the run reached, and post it if there is a service."""
        if self._begun is None or not self._counted or not self._seq_length:
            _LOGGER.info("the run was too short to compare with the recommendation")
            return
        _wait()
        end = self._last_end if self._interrupted else time.monotonic()
        seconds = max(1e-9, end - self._begun - self._paused)
        micro_batch_size = int(args.per_device_train_batch_size)
        sequences = self._counted * micro_batch_size * int(args.gradient_accumulation_steps)
        on_device = torch.cuda.is_available()
        self.report = RunReport(
            tokens_per_second=sequences * self._seq_length / seconds,
            peak_bytes=torch.cuda.max_memory_allocated() if on_device else None,
            peak_reserved_bytes=torch.cuda.max_memory_reserved() if on_device else None,
            steps=self._counted,
            micro_batch_size=micro_batch_size,
            seconds=seconds,
            device_name=device_name(),
            versions=versions(),
        )
        if getattr(state, "is_world_process_zero", True):
            _LOGGER.info("%s", self.comparison())
            self._post(self.report)

    def comparison(self) -> str:
        """Return one line that compares what was reached with what was promised."""
        if self.report is None:
            return "nothing was measured"
        reached, told = self.report, self.recommendation
        text = f"{reached.tokens_per_second:,.0f} tokens/s per device"
        if told.tokens_per_second:
            share = reached.tokens_per_second / told.tokens_per_second
            text += f" of {told.tokens_per_second:,.0f} promised ({share:.0%})"
        if reached.peak_bytes is not None:
            text += f", peak {reached.peak_bytes / 2**30:.1f} GiB"
            if told.peak_bytes:
                text += f" of {told.peak_bytes / 2**30:.1f} promised"
        if reached.micro_batch_size != told.micro_batch_size:
            text += f"; micro_batch_size {reached.micro_batch_size}, not the recommended {told.micro_batch_size}"
        return text

    def _post(self, report: RunReport) -> None:
        if self._service is None or self._exploration_id is None:
            return
        url = f"{self._service}/v1/explorations/{self._exploration_id}/run-reports"
        if not url.startswith(("http://", "https://")):
            _LOGGER.warning("the run report was not sent: %s is not the URL of a service", self._service)
            return
        sender = threading.Thread(target=_send, args=(url, self._token, asdict(report)), daemon=True)
        sender.start()
        sender.join(_TIMEOUT_SECONDS)
        if sender.is_alive():
            _LOGGER.warning("the run report was not sent: %s does not answer", self._service)


def _send(url: str, token: str | None, report: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, json.dumps(report).encode(), headers, method="POST")  # noqa: S310 - checked
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310 - checked above
            response.read()
    except (OSError, ValueError, urllib.error.URLError) as error:
        _LOGGER.warning("the run report was not sent: %s", error)


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
