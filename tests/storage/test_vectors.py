"""The arithmetic on vectors: `build_matrix` and `cosine_similarity_matrix`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rag_wiki import ChunkStore


def chunks(*vectors: Any) -> list[dict[str, Any]]:
    """Chunks with these vectors."""
    return [{"chunk_index": number, "text": "t", "vector": vector} for number, vector in enumerate(vectors)]


def cosines(query: Any, matrix: Any) -> NDArray[np.float32]:
    """The cosines of a query with the rows of a matrix."""
    return ChunkStore.cosine_similarity_matrix(query, matrix)


class TestBuildMatrix:
    """A row per chunk."""

    def test_it_holds_the_vectors(self) -> None:
        """The matrix is (n, dim) float32 with the vectors as they are, not normalised."""
        matrix = ChunkStore.build_matrix(chunks([1, 2, 3], [0.1, -4, 1e-6]))
        assert matrix is not None
        assert matrix.dtype == np.float32
        assert matrix.tolist() == np.array([[1, 2, 3], [0.1, -4, 1e-6]], dtype=np.float32).tolist()

    @pytest.mark.parametrize("given", [[], chunks(None), chunks(None, None), [{"chunk_index": 0, "text": "t"}]])
    def test_without_vectors_there_is_none(self, given: list[dict[str, Any]]) -> None:
        """No chunk, or none with a vector, gives `None`."""
        assert ChunkStore.build_matrix(given) is None

    def test_a_chunk_without_vector_keeps_its_row(self) -> None:
        """A chunk without vector has a row of zeros, so that row numbers stay chunk positions."""
        matrix = ChunkStore.build_matrix([{"chunk_index": 0, "text": "t"}, *chunks(None, [1, 2], None)])
        assert matrix is not None
        assert matrix.tolist() == [[0, 0], [0, 0], [1, 2], [0, 0]]

    @pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64])
    def test_it_takes_vectors_of_any_kind(self, kind: type[Any]) -> None:
        """Arrays of any number type, lists and tuples may stand side by side, also as one row of a matrix."""
        matrix = ChunkStore.build_matrix(chunks(np.array([1, 2], dtype=kind), [3.0, 4.0], (5, 6), np.array([[7, 8]])))
        assert matrix is not None
        assert matrix.dtype == np.float32
        assert matrix.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]

    def test_it_is_a_copy(self) -> None:
        """Changing the matrix changes no chunk."""
        vector = np.ones(2, dtype=np.float32)
        matrix = ChunkStore.build_matrix(chunks(vector))
        assert matrix is not None
        matrix[:] = 7
        assert vector.tolist() == [1, 1]

    def test_widths_that_differ_are_refused(self) -> None:
        """Vectors of two widths are a `ValueError` that names both."""
        with pytest.raises(ValueError, match=r"2, 3"):
            ChunkStore.build_matrix(chunks([1, 2], None, [1, 2, 3]))


class TestCosines:
    """Warnings are errors here, so none of these makes numpy complain."""

    def test_known_angles(self) -> None:
        """Equal, opposite, right, 45° and 60° give 1, −1, 0, √½ and ½."""
        matrix = [[2, 0], [-3, 0], [0, 5], [4, 4], [0.5, np.sqrt(0.75)]]
        got = cosines([7, 0], matrix)
        assert got.shape == (5,)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, [1, -1, 0, np.sqrt(0.5), 0.5], atol=1e-6)

    def test_it_agrees_with_the_definition(self) -> None:
        """On random vectors each cosine is the dot product over the product of lengths."""
        random = np.random.default_rng(7)
        query, matrix = random.standard_normal(384), random.standard_normal((200, 384))
        expected = matrix @ query / (np.linalg.norm(matrix, axis=1) * np.linalg.norm(query))
        np.testing.assert_allclose(cosines(query, matrix), expected, atol=1e-6)

    def test_zero_vectors_score_zero(self) -> None:
        """A row of zeros scores exactly 0, and against a query of zeros every row does."""
        assert cosines([1, 1], [[0, 0], [1, 1], [-0.0, 0]])[[0, 2]].tolist() == [0, 0]
        assert cosines([0, 0], [[1, 2], [0, 0]]).tolist() == [0, 0]

    @pytest.mark.parametrize("length", [1e-30, 1e-6, 1.0, 1e6, 1e30])
    def test_length_does_not_matter(self, length: float) -> None:
        """Vectors of any length rank as unit vectors do, and score the same."""
        random = np.random.default_rng(11)
        query, matrix = random.standard_normal(16), random.standard_normal((50, 16))
        expected = cosines(query, matrix)
        for got in (cosines(query * length, matrix), cosines(query, matrix * length)):
            np.testing.assert_allclose(got, expected, atol=1e-6)
            assert np.argsort(got).tolist() == np.argsort(expected).tolist()

    def test_it_never_leaves_the_range(self) -> None:
        """No rounding takes a cosine of a vector with itself beyond 1, or with its opposite beyond −1."""
        matrix = np.random.default_rng(3).standard_normal((500, 33)).astype(np.float32)
        for row in matrix:
            got = cosines(row, np.stack([row, -row]))
            assert got.min() >= -1
            assert got.max() <= 1
            np.testing.assert_allclose(got, [1, -1], atol=1e-6)

    @pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, list])
    def test_it_takes_vectors_of_any_kind(self, kind: Any) -> None:
        """Query and matrix may be float16, float32, float64 or lists; the query may be a row of a matrix."""
        query, matrix = [[3.0, 4.0]], [[3.0, 4.0], [4.0, -3.0]]
        made = (query, matrix) if kind is list else (np.array(query, dtype=kind), np.array(matrix, dtype=kind))
        np.testing.assert_allclose(cosines(*made), [1, 0], atol=1e-6)

    def test_a_matrix_without_rows(self) -> None:
        """No rows give no cosines."""
        assert cosines([1, 2], np.empty((0, 2))).shape == (0,)

    def test_widths_that_differ_are_refused(self) -> None:
        """A query of another width than the matrix is a `ValueError`."""
        with pytest.raises(ValueError, match=r"mismatch|width"):
            cosines([1, 2, 3], [[1, 2]])

    def test_the_matrix_stays_as_it_is(self) -> None:
        """Query and matrix are not changed."""
        query, matrix = np.array([3.0, 4.0], dtype=np.float32), np.array([[6.0, 8.0]], dtype=np.float32)
        cosines(query, matrix)
        assert (query.tolist(), matrix.tolist()) == ([3, 4], [[6, 8]])
