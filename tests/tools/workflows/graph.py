"""A workflow as its author thinks of it: columns of groups of nodes, links and files by name."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .picture import Rows

# Colors of groups: ordinary nodes, nodes of this pack, and the note.
USUAL, FAST, PLAIN = "#3f789e", "#8A8", "#888"

# Placeholder for the note of the graph, which is complete after all nodes are added.
README = object()


@dataclass(frozen=True)
class Model:
    """A file that a loader needs. As the value of an input it is also added to the properties.

    Attributes:
        name: Entry in the loader's list.
        url: Address of the download; the last part of the path is the name.
        directory: Folder within `models`.
    """

    name: str
    url: str
    directory: str


@dataclass(frozen=True)
class Output:
    """One output of a node, by its name."""

    node: "Node"
    name: str


@dataclass
class Node:
    """A node.

    Attributes:
        kind: The id of its class.
        inputs: By name: an `Output` or a `Node` with one output is a link, all else the value of a
            widget.
        title: None: the node's own.
        labels: Names shown for its inputs; other inputs have the node's own.
        least: Its least height, without its title, in pixels.
        stretch: Whether it fills the rest of its column.
        color: Of its title; None: as usual.
        bgcolor: Of its body; None: as usual.
        width: In a group that is a row; None: an equal part of what the others leave.
    """

    kind: str
    inputs: dict[str, object]
    title: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    least: int = 0
    stretch: bool = False
    color: str | None = None
    bgcolor: str | None = None
    width: int | None = None

    def __getitem__(self, name: str) -> Output:
        return Output(self, name)

    @property
    def models(self) -> list[Model]:
        """The files that it needs."""
        return [value for value in self.inputs.values() if isinstance(value, Model)]


@dataclass
class Group:
    """Nodes with a title above.

    Attributes:
        title: What they do.
        nodes: From top to bottom, or from left to right.
        color: Of its ground.
        row: Whether the nodes are next to each other, as wide as the column together.
    """

    title: str
    nodes: list[Node] = field(default_factory=list)
    color: str = USUAL
    row: bool = False

    def add(
        self,
        kind: str,
        title: str | None = None,
        least: int = 0,
        stretch: bool = False,
        **inputs: object,
    ) -> Node:
        """Add a node at the bottom. Input names with dots: `**{"a.b": value}`."""
        node = Node(kind, inputs, title, least=least, stretch=stretch)
        self.nodes.append(node)
        return node

    def encode_text(self, least: int, clip: Node, positive: str, negative: str) -> dict:
        """Add a text encoder; return its conditionings by the names of a sampler's inputs."""
        inputs = {"clip": clip, "positive": positive, "negative": negative}
        node = self.add("FastVAE_TextEncode", least=least, stretch=True, **inputs)
        return {name: node[name] for name in ("positive", "negative")}

    def decode_video(
        self, least: int, name: str, vae: Node, latent: object, **inputs: object
    ) -> None:
        """Decode a latent to a file in `output/video`; `inputs` are its other inputs."""
        inputs |= {"samples": latent, "vae": vae, "filename_prefix": f"video/{name}"}
        self.add("FastVAE_DecodeVideo", least=least, stretch=True, **inputs)

    def save_video(self, least: int, name: str, codec: str | None = None, **inputs: object) -> None:
        """Images, and what else makes a video, into a file of `output/video`."""
        video = self.add("CreateVideo", **inputs)
        form = {} if codec is None else {"format": "mp4", "format.codec": codec}
        form |= {"video": video, "filename_prefix": f"video/{name}"}
        self.add("SaveVideo", least=least, stretch=True, **form)


@dataclass
class Column:
    """Groups below each other, all of one width."""

    width: int
    groups: list[Group] = field(default_factory=list)

    def group(self, title: str, color: str = USUAL, row: bool = False) -> Group:
        """A group at the bottom."""
        group = Group(title, color=color, row=row)
        self.groups.append(group)
        return group

    @property
    def nodes(self) -> list[Node]:
        """Its nodes, from top to bottom."""
        return [node for group in self.groups for node in group.nodes]


@dataclass
class Graph:
    """A workflow.

    Attributes:
        name: Of the file.
        text: What users read: Markdown. `FILES` in it becomes the list of the files. Empty: there
            is no note.
        blocks: Its thumbnail.
        columns: From left to right.
        gap: Pixels between columns, for the rims of two groups and for links.
    """

    name: str
    text: str = ""
    blocks: Rows = ()
    columns: list[Column] = field(default_factory=list)
    gap: int = 60

    def column(self, width: int) -> Column:
        """A column on the right; the first begins with the text, as high as fits."""
        column = Column(width)
        if self.text and not self.columns:
            read_me = column.group("Read me", PLAIN)
            note = read_me.add("MarkdownNote", "How to use it", stretch=True, text=README)
            note.color, note.bgcolor = "#222", "#000"
        self.columns.append(column)
        return column

    @property
    def nodes(self) -> list[Node]:
        """All nodes, column by column."""
        return [node for column in self.columns for node in column.nodes]

    @property
    def models(self) -> list[Model]:
        """The files that it needs, each once."""
        return list(dict.fromkeys(model for node in self.nodes for model in node.models))

    def markdown(self) -> str:
        """The text with the list of the files, by folder."""
        lines = [f"- [{m.name}]({m.url}) in `models/{m.directory}`" for m in self.models]
        return self.text.strip().replace("FILES", "\n".join(lines)) + "\n"


def links(graph: Graph) -> Iterator[tuple[Output, Node, str]]:
    """Yield every link: output, target node, input name.

    Raises:
        ValueError: A link starts at a node that is not in the graph.
    """
    known = {id(node) for node in graph.nodes}
    for node in graph.nodes:
        for name, value in node.inputs.items():
            source = Output(value, "") if isinstance(value, Node) else value
            if isinstance(source, Output):
                if id(source.node) not in known:
                    raise ValueError(f"{node.kind}.{name}: its {source.node.kind} is not here")
                yield source, node, name
