// How many threads the kernels run on: what torch.set_num_threads has set, if one runtime serves both.
#include "vec.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

EXPORT int32_t taut_num_threads() {
#if defined(_OPENMP)
  return omp_get_max_threads();
#else
  return 1;
#endif
}
