// Huge pages for memory that Python asks for.
#include "pages.h"

#include "vec.h"

EXPORT void taut_ask_for_huge_pages(void* memory, int64_t bytes) { ask_for_huge_pages(memory, bytes); }
