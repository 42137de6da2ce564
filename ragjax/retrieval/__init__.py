"""From texts and triples to what a question needs: documents, chunks, vector index; graph, entities, relation paths."""
