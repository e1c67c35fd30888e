"""Standard sizes: hybrids of 5 million and 0.25 billion parameters, a published model, and the work measured with each.

Standard library only: peers read it in environments of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

OWN = 128  # tokens of a prompt after the shared ones
CHATS, TURNS, SAID, ANSWERED = 8, 4, 200, 64


@dataclass(frozen=True)
class Shape:
    """Shape of a NemotronH or Llama model in fp32.

    Attributes:
        pattern: A letter for each layer: M Mamba-2, * attention, - MLP, G gated MLP.
        groups: Groups of B and C of a Mamba layer.
        state: State size of a Mamba layer.
        chunk: Tokens of a chunk of transformers' scan.
    """

    vocabulary: int
    hidden: int
    pattern: str
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    groups: int = 0
    state: int = 0
    chunk: int = 0

    @property
    def layer_matrices(self) -> int:
        """Parameters of all matrices that each token is multiplied with, the output layer's left out."""
        inner = self.mamba_heads * self.mamba_head_dim
        of_layer = {
            "M": self.hidden * (3 * inner + 2 * self.groups * self.state + self.mamba_heads),
            "*": 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads),
            "-": 2 * self.hidden * self.mlp,
            "G": 3 * self.hidden * self.mlp,
        }
        return sum(of_layer[layer] for layer in self.pattern)

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights that a decode step reads, however many requests it has."""
        return 4 * (self.layer_matrices + self.vocabulary * self.hidden)

    def prefill_operations(self, lengths: Sequence[int], skipped: int = 0) -> float:
        """Return the operations that prompts need: matrices once a token, causal attention, the scan's outer products.

        The output layer counts once a prompt, since only the last token's logits are needed.

        Args:
            lengths: Tokens of each prompt.
            skipped: Tokens at the start of each prompt that are not computed.
        """
        scan = self.pattern.count("M") * 4 * self.mamba_heads * self.mamba_head_dim * self.state
        computed = sum(lengths) - skipped * len(lengths)
        pairs = sum((length * (length + 1) - skipped * (skipped + 1)) / 2 for length in lengths)
        attention = self.pattern.count("*") * 4 * self.heads * self.head_dim * pairs
        output = 2 * self.hidden * self.vocabulary * len(lengths)
        return computed * (2 * self.layer_matrices + scan) + attention + output


@dataclass(frozen=True)
class Work:
    """Amount of work of the standard rows.

    Attributes:
        prefixes: Lengths of the shared prefixes.
        cold: Repeats of a first request, of which a single one says too little.
        alone: Requests with a shared prefix that are served one at a time.
        together: Requests with a shared prefix, of which eight are served at once.
        unrelated: Requests with nothing in common, of which eight are served at once.
        unique: Tokens of each of them.
        generated: Tokens that each request generates.
        batches: Numbers of requests of the decode steps.
        steps: Decode steps that are timed, after prompts of `OWN` / 2 tokens.
        chats: Conversations.
        blocks: Blocks of 64 tokens that hold all of it.
        slots: Snapshot slots that hold all of it.
    """

    prefixes: tuple[int, ...]
    cold: int
    alone: int
    together: int
    unrelated: int
    unique: int
    generated: int
    batches: tuple[int, ...]
    steps: int
    chats: int
    blocks: int
    slots: int


@dataclass(frozen=True)
class Size:
    """Model and work.

    Attributes:
        title: Name in tables.
        piece: Tokens that transformers prefills at a time; its scan keeps every weight of a chunk.
        published: Environment variable with the folder of a published model; None for random weights.
    """

    title: str
    shape: Shape
    work: Work
    piece: int
    published: str | None = None

    def quick(self) -> Size:
        """Return the size for a run that only shows errors: fewer layers, and little work."""
        work = replace(
            self.work,
            prefixes=(256,),
            cold=1,
            alone=2,
            together=3,
            unrelated=3,
            unique=200,
            generated=4,
            batches=(1, 2),
            steps=2,
            chats=min(self.work.chats, 1),
        )
        return replace(self, shape=self.shape if self.published else replace(self.shape, pattern="M-*"), work=work)


_OF_LARGE = Work(
    prefixes=(2_048,),
    cold=2,
    alone=5,
    together=16,
    unrelated=8,
    unique=544,
    generated=16,
    batches=(1, 4, 8, 16),
    steps=12,
    chats=0,
    blocks=400,
    slots=24,
)
SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "5m": Size(
            title="5 M",
            shape=Shape(
                vocabulary=4_096,
                hidden=256,
                pattern="M-M*M-M*",
                mlp=1_024,
                heads=8,
                kv_heads=2,
                head_dim=32,
                mamba_heads=16,
                mamba_head_dim=32,
                groups=2,
                state=64,
                chunk=128,
            ),
            work=Work(
                prefixes=(2_048, 8_192),
                cold=3,
                alone=16,
                together=16,
                unrelated=16,
                unique=2_176,
                generated=32,
                batches=(1, 4, 8, 16),
                steps=40,
                chats=CHATS,
                blocks=1_600,
                slots=64,
            ),
            piece=2_048,
        ),
        "250m": Size(
            title="0.25 B",
            shape=Shape(
                vocabulary=32_000,
                hidden=1_024,
                pattern="M-M-M-M*-" * 4,
                mlp=2_048,
                heads=16,
                kv_heads=4,
                head_dim=64,
                mamba_heads=32,
                mamba_head_dim=64,
                groups=1,
                state=128,
                chunk=256,
            ),
            work=_OF_LARGE,
            piece=512,
        ),
        "smollm2": Size(
            title="SmolLM2-135M",
            shape=Shape(
                vocabulary=49_152,
                hidden=576,
                pattern="*G" * 30,
                mlp=1_536,
                heads=9,
                kv_heads=3,
                head_dim=64,
            ),
            work=_OF_LARGE,
            piece=512,
            published="SMOLLM2",
        ),
    }
)
