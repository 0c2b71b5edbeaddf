"""One adapter per library of the published table. What a library has no words for raises NotOffered, with the reason that the table prints."""
