"""A scheduler, a batch builder and the fake runner, stepped by hand with one plan in flight."""

from collections.abc import Callable

from hillstar.engine.batch import BatchBuilder
from hillstar.engine.intake import Intake
from hillstar.engine.kv.manager import BlockManager
from hillstar.engine.messages import Finish, Output, SamplingParams, Submit, pack_ids, unpack_ids
from hillstar.engine.plan import Pending, Plan
from hillstar.engine.scheduler import Command, Scheduler
from hillstar.engine.spec.speculation import Speculation
from support.fake_runner import EOS_ID, FakeModel, FakeRunner, fake_generate

ROUND_S = 0.01  # what a round takes in which nothing is computed


def submit(
    sequence_id: str,
    prompt: list[int],
    *,
    output: list[int] | None = None,
    max_tokens: int = 8,
    explicit: bool = True,
    seed: int = 0,
    priority: int = 0,
    tenant: str = "local",
    lease_id: str | None = None,
    ignore_eos: bool = False,
    min_tokens: int = 0,
) -> Submit:
    return Submit(
        sequence_id=sequence_id,
        prompt_ids=pack_ids(prompt),
        output_ids=pack_ids(output or []),
        params=SamplingParams(
            max_tokens=max_tokens,
            max_tokens_is_explicit=explicit,
            seed=seed,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
        ),
        priority=priority,
        tenant=tenant,
        salt=tenant.encode(),
        lease_id=lease_id,
    )


class EngineBench:
    """Everything that came out is in `tokens`, `finishes` and `plans`. Time is in `now_s`; a step
    takes as long as `step_s` says of its plan."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 8,
        max_num_seqs: int = 8,
        max_batched_tokens: int = 64,
        max_model_len: int = 512,
        max_waiting: int = 100,
        model: FakeModel | None = None,
        eager: bool = False,
        inter_token_target_s: float | None = None,
        speculation: Speculation | None = None,
        step_s: Callable[[Plan], float] = lambda _: ROUND_S,
    ) -> None:
        self.model = model or FakeModel()
        self.num_kv_tokens = num_blocks * block_size
        self.max_model_len = max_model_len
        self.now_s = 0.0
        self.blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(
            intake=Intake(
                max_model_len=max_model_len,
                num_blocks=num_blocks,
                block_size=block_size,
                vocab_size=self.model.vocab_size,
                eos_token_ids=frozenset({EOS_ID}),
                kv_space=b"fake",
            ),
            blocks=self.blocks,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            max_waiting=max_waiting,
            inter_token_target_s=inter_token_target_s,
            speculation=speculation,
            clock=lambda: self.now_s,
        )
        self.builder = BatchBuilder(
            max_num_seqs=max_num_seqs, max_blocks=num_blocks, block_size=block_size
        )
        self.runner = FakeRunner(self.model, num_blocks, block_size, eager=eager)
        self.submits: dict[str, Submit] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finishes: dict[str, Finish] = {}
        self.plans: list[Plan] = []
        self._checks = True
        self._step_s = step_s
        self._in_flight: tuple[Plan, Pending] | None = None

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None

    def tell(self, command: Command) -> None:
        if isinstance(command, Submit) and command.sequence_id not in self.submits:
            self.submits[command.sequence_id] = command
        self._take(self.scheduler.handle(command))
        self._check()

    def step(self) -> Plan | None:
        """One round of the loop: plan and launch the next step, then resolve the one before."""
        plan = self.scheduler.schedule()
        self._check()
        before = self._in_flight
        self._in_flight = None
        if plan is not None:
            self.plans.append(plan)
            self._in_flight = (plan, self.runner.run(self.builder.build(plan)))
        seconds = ROUND_S if before is None else self._step_s(before[0])
        self.now_s += seconds
        if before is not None:
            self._take(self.scheduler.update(before[0], before[1].result(), seconds))
            self._check()
        return plan

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left to do; the number of steps."""
        for num_steps in range(max_steps):
            was_idle = self.is_idle
            if self.step() is None and was_idle:
                return num_steps
        raise AssertionError(f"not idle after {max_steps} steps")

    def teach_short_outputs(self) -> None:
        """Let the scheduler learn that outputs are short, so that it admits far too many."""
        self._checks = False
        for number in range(50):
            self.tell(submit(f"lesson{number}", [1], max_tokens=1, ignore_eos=True))
            self.run()
        self._checks = True
        self.submits.clear()
        self.tokens.clear()
        self.finishes.clear()
        self.plans.clear()

    def expected(self, sequence_id: str) -> list[int]:
        """The whole output of a sequence that nobody cancels, by the oracle."""
        message = self.submits[sequence_id]
        prompt = ids_of(message.prompt_ids)
        room = min(self.max_model_len, self.num_kv_tokens + 1) - len(prompt)
        limit = min(message.params.max_tokens, room)
        return fake_generate(prompt, message.params, self.model, limit)

    def _check(self) -> None:
        if self._checks:
            self.scheduler.check()

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish is not None and output.finish.reason == "refused":
                self.finishes.setdefault(output.sequence_id, output.finish)
                continue
            assert output.sequence_id not in self.finishes, "output after the finish"
            resumed = ids_of(self.submits[output.sequence_id].output_ids)
            tokens = self.tokens.setdefault(output.sequence_id, resumed)
            assert output.first_token == len(tokens), "tokens come without gaps"
            tokens += output.token_ids
            if output.finish is not None:
                self.finishes[output.sequence_id] = output.finish


def ids_of(data: bytes) -> list[int]:
    return [int(token) for token in unpack_ids(data)]


def prompt(first: int, length: int) -> list[int]:
    """Tokens that no prompt of another `first` begins with."""
    return [first] + [(first * 7 + index * 3) % 49 + 1 for index in range(length - 1)]


def assert_outputs_are_the_oracles(bench: EngineBench) -> None:
    for name in bench.submits:
        assert bench.tokens[name] == bench.expected(name), name
