"""Triples kept in a graph database that speaks Cypher: Neo4j or FalkorDB (DepCache, section 6, uses the latter).

An entity is a node (:Entity {name}), a triple a relationship [:RELATION {name}] between two, and an alias a node
(:Alias {entity, name}). All names go as parameters, never as text of a query.

What is tested: the queries and parameters that a fake `Run` gets, and the answers it gives back. No test runs against
a live database; try an import on yours before relying on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ragjax.core import ConfigError
from ragjax.retrieval.path import Triple
from ragjax.retrieval.triples import Alias, batches, forward

Run = Callable[[str, Mapping[str, object]], Sequence[Sequence[Any]]]
"""Carries out a query with its parameters; returns the rows of the result."""

_BATCH = 1_000  # rows of one query: databases keep a transaction in memory
_EDGE = "(h:Entity {name: row[0]})-[r:RELATION {name: row[1]}]->(t:Entity {name: row[2]})"
_KNOWN = f"UNWIND $rows AS row MATCH {_EDGE} RETURN count(DISTINCT r)"
_ADD = """
UNWIND $rows AS row MERGE (h:Entity {name: row[0]}) MERGE (t:Entity {name: row[2]})
MERGE (h)-[:RELATION {name: row[1]}]->(t)
"""
_DELETE = f"UNWIND $rows AS row MATCH {_EDGE} DELETE r"
_COUNT = "MATCH (:Entity)-[r:RELATION]->(:Entity) RETURN count(r)"
_ENTITIES = "MATCH (e:Entity)-[:RELATION]-() RETURN DISTINCT e.name"
_HAS = "MATCH (e:Entity {name: $entity})-[r:RELATION]-() RETURN e.name LIMIT 1"
_OUT = """
MATCH (e:Entity {name: $entity})-[r:RELATION]->(t:Entity)
RETURN e.name, r.name, t.name ORDER BY r.name, t.name LIMIT $limit
"""
_INTO = """
MATCH (h:Entity)-[r:RELATION]->(e:Entity {name: $entity}) WHERE h.name <> $entity
RETURN h.name, r.name, e.name ORDER BY h.name, r.name LIMIT $limit
"""
_ALIASES_KNOWN = "UNWIND $rows AS row MATCH (a:Alias {entity: row[0], name: row[1]}) RETURN count(DISTINCT a)"
_ADD_ALIASES = "UNWIND $rows AS row MERGE (:Alias {entity: row[0], name: row[1]})"
_ALIASES = "MATCH (a:Alias) WHERE $entity IS NULL OR a.entity = $entity RETURN a.entity, a.name"
_INDEXES = ("CREATE INDEX {}FOR (e:Entity) ON (e.name)", "CREATE INDEX {}FOR (a:Alias) ON (a.entity)")


class CypherStore:
    """A `TripleStore` over a database that `run` reaches.

    close: called when the store is closed.
    """

    def __init__(self, run: Run, close: Callable[[], object] | None = None):
        self._run = run
        self._close = close
        self._writing = threading.Lock()

    @classmethod
    def neo4j(cls, uri: str, user: str, password: str, database: str | None = None) -> CypherStore:
        """Over a Neo4j server ("neo4j://host:7687"; database None: its default one). Needs the extra `neo4j`.

        Raises:
            ConfigError: the driver is missing, or the server cannot be reached.
        """
        try:
            import neo4j
        except ImportError as error:
            raise ConfigError("Neo4j needs its driver: pip install '.[neo4j]' in ragjax's folder") from error

        try:
            driver = neo4j.GraphDatabase.driver(uri, auth=(user, password))
        except Exception as error:  # the driver has two families of errors
            raise ConfigError(f"{uri}: Neo4j cannot be used: {error}") from error

        def run(query: str, parameters: Mapping[str, object]) -> Sequence[Sequence[Any]]:
            found = driver.execute_query(query, parameters_=dict(parameters), database_=database)
            return [record.values() for record in found.records]

        try:
            driver.verify_connectivity()  # does not try for half a minute, as queries do
            for index in _INDEXES:
                run(index.format("IF NOT EXISTS "), {})
        except Exception as error:
            driver.close()
            raise ConfigError(f"{uri}: Neo4j cannot be used: {error}") from error
        return cls(run, driver.close)

    @classmethod
    def falkordb(cls, host: str, port: int = 6379, graph: str = "ragjax", password: str | None = None) -> CypherStore:
        """Over one graph of a FalkorDB server. Needs the extra `falkordb`.

        Raises:
            ConfigError: the client is missing, or the server cannot be reached.
        """
        try:
            import falkordb
        except ImportError as error:
            raise ConfigError("FalkorDB needs its client: pip install '.[falkordb]' in ragjax's folder") from error

        try:
            database = falkordb.FalkorDB(host=host, port=port, password=password)
            selected = database.select_graph(graph)

            def run(query: str, parameters: Mapping[str, object]) -> Sequence[Sequence[Any]]:
                rows: Sequence[Sequence[Any]] = selected.query(query, dict(parameters)).result_set
                return rows

            for index in _INDEXES:
                _unless_there(run, index.format(""))
        except Exception as error:  # those of its network client
            raise ConfigError(f"{host}:{port}: FalkorDB cannot be used: {error}") from error
        return cls(run, database.connection.close)

    def add(self, triples: Iterable[Triple]) -> int:
        """As `TripleStore.add`."""
        return sum(self._write(_ADD, _KNOWN, _rows(batch)) for batch in batches(triples, _BATCH))

    def delete(self, triples: Iterable[Triple]) -> int:
        """As `TripleStore.delete`."""
        gone = 0
        for batch in batches(triples, _BATCH):
            rows = _rows(batch)
            with self._writing:
                gone += self._number(_KNOWN, rows=rows)
                self._run(_DELETE, {"rows": rows})
        return gone

    def __len__(self) -> int:
        """Number of triples."""
        return self._number(_COUNT)

    def entities(self) -> Iterator[str]:
        """As `TripleStore.entities`."""
        return (name for (name,) in self._run(_ENTITIES, {}))

    def edges(self, entity: str, limit: int) -> tuple[Triple, ...]:
        """As `TripleStore.edges`."""
        asked = {"entity": entity, "limit": limit}
        out, into = self._run(_OUT, asked), self._run(_INTO, asked)
        return (*sorted(Triple(*row) for row in out), *sorted(Triple(*row) for row in into))

    def has(self, entity: str) -> bool:
        """As `TripleStore.has`."""
        return bool(self._run(_HAS, {"entity": entity}))

    def add_aliases(self, aliases: Iterable[Alias]) -> int:
        """As `TripleStore.add_aliases`."""
        rows = ([list(alias) for alias in dict.fromkeys(batch)] for batch in batches(aliases, _BATCH))
        return sum(self._write(_ADD_ALIASES, _ALIASES_KNOWN, batch) for batch in rows)

    def aliases(self, entity: str | None = None) -> Iterator[Alias]:
        """As `TripleStore.aliases`."""
        return (Alias(*row) for row in self._run(_ALIASES, {"entity": entity}))

    def close(self) -> None:
        """As `TripleStore.close`."""
        if self._close is not None:
            self._close()

    def _write(self, query: str, known: str, rows: list[list[str]]) -> int:
        with self._writing:
            before = self._number(known, rows=rows)
            self._run(query, {"rows": rows})
        return len(rows) - before

    def _number(self, query: str, **parameters: object) -> int:
        return int(self._run(query, parameters)[0][0])


def _rows(batch: Iterable[Triple]) -> list[list[str]]:
    return [list(triple) for triple in dict.fromkeys(forward(triple) for triple in batch)]


def _unless_there(run: Run, query: str) -> None:
    """FalkorDB has no IF NOT EXISTS, and complains."""
    try:
        run(query, {})
    except Exception as error:
        if "already indexed" not in str(error):
            raise
