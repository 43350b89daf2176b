"""Random lives of an engine against the oracle: whatever happens, the output is the same."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hillstar.engine.messages import Cancel, Park, Release, Unpark
from hillstar.engine.spec.speculation import Speculation
from support.engine_bench import EngineBench, ids_of, submit
from support.fake_runner import FakeModel

small = st.integers(0, 7)


class EngineMachine(RuleBasedStateMachine):
    """Submits, forks, cancels, parks and releases between steps, in pools that are too small."""

    @initialize(
        num_blocks=st.integers(3, 16),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(8, 40),
        eager=st.booleans(),
        hopeful=st.booleans(),
        eos_probability=st.sampled_from([0.0, 0.05, 0.3]),
        drafts=st.booleans(),
        refrain=st.sampled_from([None, 1, 3]),
    )
    def build(
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        eager: bool,
        hopeful: bool,
        eos_probability: float,
        drafts: bool,
        refrain: int | None,
    ) -> None:
        self.bench = EngineBench(
            num_blocks=num_blocks,
            block_size=8,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max(budget, max_num_seqs),
            max_model_len=96,
            max_waiting=12,
            model=FakeModel(vocab_size=6, eos_probability=eos_probability, refrain=refrain),
            eager=eager,
            speculation=Speculation() if drafts else None,
        )
        if hopeful:
            self.bench.teach_short_outputs()
        self.count = 0
        self.cancelled: set[str] = set()
        self.parked: set[str] = set()
        self.leases: set[str] = set()

    @property
    def live(self) -> list[str]:
        return [name for name in self.bench.submits if name not in self.bench.finishes]

    def submit(self, prompt: list[int], lease_id: str | None, **options: object) -> None:
        name = f"s{self.count}"
        self.count += 1
        if lease_id is not None:
            self.leases.add(lease_id)
        self.bench.tell(submit(name, prompt, lease_id=lease_id, **options))  # type: ignore[arg-type]

    @rule(
        prompt=st.lists(st.integers(1, 3), min_size=1, max_size=60),
        max_tokens=st.integers(0, 40),
        explicit=st.booleans(),
        seed=st.integers(0, 2),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("ab"),
        lease=st.sampled_from([None, "x", "y", "z"]),
        copies=st.integers(1, 3),
    )
    def submit_new(
        self,
        prompt: list[int],
        max_tokens: int,
        explicit: bool,
        seed: int,
        priority: int,
        tenant: str,
        lease: str | None,
        copies: int,
    ) -> None:
        """One prompt, or several samples of it."""
        for sample in range(copies):
            self.submit(
                prompt,
                lease if sample == 0 else None,
                max_tokens=max_tokens,
                explicit=explicit,
                seed=seed + sample,
                priority=priority,
                tenant=tenant,
            )

    @precondition(lambda self: bool(self.bench.tokens))
    @rule(
        which=small,
        cut=st.integers(0, 30),
        more=st.lists(st.integers(1, 3), max_size=12),
        max_tokens=st.integers(0, 30),
        lease=st.sampled_from([None, "x", "y", "z"]),
    )
    def submit_fork(
        self, which: int, cut: int, more: list[int], max_tokens: int, lease: str | None
    ) -> None:
        """A next turn of some sequence, or a fork anywhere in it, while it may still run."""
        name = sorted(self.bench.tokens)[which % len(self.bench.tokens)]
        message = self.bench.submits[name]
        context = ids_of(message.prompt_ids) + self.bench.tokens[name]
        prompt = context[: max(1, len(context) - cut)] + more
        self.submit(prompt, lease, max_tokens=max_tokens, tenant=message.tenant)

    @precondition(lambda self: bool(self.bench.tokens))
    @rule(which=small, num_output=st.integers(1, 12))
    def submit_resumed(self, which: int, num_output: int) -> None:
        """What a restarted server does: the same sequence again, with some of its output."""
        name = sorted(self.bench.tokens)[which % len(self.bench.tokens)]
        message = self.bench.submits[name]
        self.submit(
            ids_of(message.prompt_ids),
            None,
            output=self.bench.tokens[name][:num_output],
            max_tokens=message.params.max_tokens,
            explicit=message.params.max_tokens_is_explicit,
            seed=message.params.seed,
            tenant=message.tenant,
        )

    @precondition(lambda self: bool(self.live))
    @rule(which=small, keep=st.none() | st.integers(0, 20))
    def cancel(self, which: int, keep: int | None) -> None:
        name = self.live[which % len(self.live)]
        self.bench.tell(Cancel(name, keep))
        self.cancelled.add(name)
        finish = self.bench.finishes[name]
        assert finish.reason == "cancelled"
        num_output = len(self.bench.tokens.get(name, []))
        assert finish.usage.num_output_tokens == (
            num_output if keep is None else min(keep, num_output)
        )

    @precondition(lambda self: bool(self.live))
    @rule(which=small)
    def park(self, which: int) -> None:
        name = self.live[which % len(self.live)]
        self.bench.tell(Park(name))
        self.parked.add(name)

    @precondition(lambda self: bool(self.parked))
    @rule(which=small)
    def unpark(self, which: int) -> None:
        name = sorted(self.parked)[which % len(self.parked)]
        self.bench.tell(Unpark(name))
        self.parked.discard(name)

    @rule(lease=st.sampled_from("xyz"), erase=st.booleans())
    def release(self, lease: str, erase: bool) -> None:
        self.bench.tell(Release(lease, erase))

    @rule()
    def step(self) -> None:
        self.bench.step()

    @rule(num_steps=st.integers(2, 12))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.bench.step()

    def teardown(self) -> None:
        """All that was not cancelled ends as the oracle says, and every block comes home."""
        if not hasattr(self, "bench"):
            return
        for name in self.parked:
            self.bench.tell(Unpark(name))
        self.bench.run()
        for name in self.bench.submits:
            finish = self.bench.finishes[name]
            if finish.reason == "refused":
                continue
            said, expected = self.bench.tokens[name], self.bench.expected(name)
            if name in self.cancelled:
                assert said == expected[: len(said)], name
            else:
                assert said == expected, name
                assert finish.usage.num_output_tokens == len(said)
        for lease in self.leases:
            self.bench.tell(Release(lease))
        stats = self.bench.scheduler.stats()
        assert (stats.waiting, stats.running, stats.parked) == (0, 0, 0)
        assert stats.blocks_leased == 0
        assert stats.blocks_free + stats.blocks_cached == self.bench.blocks.pool.num_blocks


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=40)
