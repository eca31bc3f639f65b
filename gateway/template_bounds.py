"""Rewrites a template so that its sandbox sees each turn of a loop, and each value that is made or written."""

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer


def with_bounds(template: nodes.Template) -> nodes.Template:
    """Put calls of the sandbox's ``step``, ``written``, ``bounded`` and ``joined`` into a parsed template."""
    _Rewriter().visit(template)
    return template


class _Rewriter(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._stepping(node)
        if node.test is not None:
            # What a loop passes over is looked at too.
            node.test = nodes.And(_call("step", nodes.Const(0)), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._stepping(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._stepping(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [part if isinstance(part, nodes.TemplateData) else _call("written", part) for part in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", *node.nodes)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.node is None:  # of a block: its text was counted when it was written
            return node
        node.node = _call("bounded", node.node)
        return _call("bounded", node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._literal(node) if node.ctx == "load" else node

    def _literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _call("bounded", node)

    def _stepping(self, node: Any) -> nodes.Node:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step", nodes.Const(text))))
        return node  # type: ignore[no-any-return]


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None, lineno=arguments[0].lineno)
