"""What a model computes: typed ops on tensors with symbolic extents."""

from tilewright.graph.build import GraphBuilder, Value
from tilewright.graph.dims import Dim, DimDecl, Role
from tilewright.graph.ir import Graph, Group, Input, Node, State, Weight, WeightExpr
from tilewright.graph.types import TensorType

__all__ = [
    "Dim", "DimDecl", "Graph", "GraphBuilder", "Group", "Input", "Node", "Role", "State",
    "TensorType", "Value", "Weight", "WeightExpr",
]
