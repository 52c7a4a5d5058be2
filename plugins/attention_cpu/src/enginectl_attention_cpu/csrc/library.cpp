// The functions that Python calls. Handles are pointers that the caller frees; a dtype is 0 for fp32, 1 for bf16, 2 for
// fp16. Functions that can run out of memory return null or -1.
#include <limits>
#include <type_traits>

#include "attention.hpp"
#include "block.hpp"

using namespace ectl;

namespace {

enum Dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Call with a value of the dtype's type.
template <class Fn>
auto dispatch(int dtype, Fn&& fn) {
  return dtype == BFLOAT16 ? fn(bf16{}) : dtype == FLOAT16 ? fn(f16{}) : fn(0.0f);
}

template <class Fn>
int guarded(OpSet* set, Fn&& fn) {
  try {
    const std::lock_guard<std::mutex> lock(set->busy);
    fn();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

template <class Fn>
void* made(OpSet* set, Fn&& fn) {
  void* result = nullptr;
  return guarded(set, [&] { result = fn(); }) == 0 ? result : nullptr;
}

struct AttentionState {
  Team team;
  Scratch partial;
  Work work;
  std::mutex busy;
  explicit AttentionState(int num_threads) : team(num_threads) {}
};

}  // namespace

extern "C" {

void* ectl_op_set(int num_threads) { return new (std::nothrow) OpSet(num_threads); }
void ectl_op_set_free(void* set) { delete static_cast<OpSet*>(set); }

void* ectl_linear(OpSet* set, int dtype, const void* weight, const void* bias, int k, int n) {
  return made(set, [&] {
    return dispatch(dtype, [&](auto t) -> void* {
      using T = decltype(t);
      return new Linear<T>(*set, static_cast<const T*>(weight), static_cast<const T*>(bias), k, n);
    });
  });
}
int ectl_linear_run(OpSet* set, void* linear, int dtype, const void* x, int num_rows, void* out) {
  return guarded(set, [&] {
    dispatch(dtype, [&](auto t) {
      using T = decltype(t);
      static_cast<Linear<T>*>(linear)->run(static_cast<const T*>(x), num_rows, static_cast<T*>(out));
    });
  });
}
void ectl_linear_free(void* linear, int dtype) {
  dispatch(dtype, [&](auto t) { delete static_cast<Linear<decltype(t)>*>(linear); });
}

int ectl_rms_norm(OpSet* set, int dtype, const void* x, const float* weight, float eps, int num_rows, int n,
                  void* out) {
  return guarded(set, [&] {
    dispatch(dtype, [&](auto t) {
      using T = decltype(t);
      const Norm norm{weight, eps};
      for_rows(set->team, num_rows, [&](int row) {
        T* to = static_cast<T*>(out) + static_cast<size_t>(row) * n;
        norm_row(static_cast<const T*>(x) + static_cast<size_t>(row) * n, n, norm,
                 [&](int i, F y, int count) { store(to + i, y, count); });
      });
    });
  });
}

void* ectl_block(OpSet* set, int dtype, const Shape* shape, const Weights* weights) {
  return made(set, [&] {
    return dispatch(dtype, [&](auto t) -> void* { return new Block<decltype(t)>(*set, *shape, *weights); });
  });
}
int ectl_block_before(OpSet* set, void* block, int dtype, const void* hidden, const float* cos, const float* sin,
                      int num_rows, void* qkv, const int32_t* slots) {
  return guarded(set, [&] {
    dispatch(dtype, [&](auto t) {
      using T = decltype(t);
      static_cast<Block<T>*>(block)->before(static_cast<const T*>(hidden), cos, sin, num_rows, static_cast<T*>(qkv),
                                              slots);
    });
  });
}
int ectl_block_after(OpSet* set, void* block, int dtype, void* hidden, const void* attended, int num_rows,
                     const int32_t* slots) {
  return guarded(set, [&] {
    dispatch(dtype, [&](auto t) {
      using T = decltype(t);
      static_cast<Block<T>*>(block)->after(static_cast<T*>(hidden), static_cast<const T*>(attended), num_rows, slots);
    });
  });
}
int ectl_block_make_low_rank(OpSet* set, void* block, int dtype, int linear, int num_slots, int max_rank, int num_parts,
                             const int32_t* sizes) {
  return guarded(set, [&] {
    dispatch(dtype, [&](auto t) {
      std::vector<int> ends(sizes, sizes + num_parts);
      std::partial_sum(ends.begin(), ends.end(), ends.begin());
      static_cast<Block<decltype(t)>*>(block)->make_low_rank(linear, num_slots, max_rank, std::move(ends));
    });
  });
}
size_t ectl_block_packed_low_rank_bytes(void* block, int dtype, int linear, int rank) {
  return dispatch(dtype, [&](auto t) -> size_t {
    return static_cast<Block<decltype(t)>*>(block)->low_rank(linear).packed_words(rank) * sizeof(uint32_t);
  });
}
// May run beside steps and beside itself.
void ectl_block_pack_low_rank(void* block, int dtype, int linear, int rank, const void* down, const void* up,
                              void* out) {
  dispatch(dtype, [&](auto t) {
    using T = decltype(t);
    static_cast<Block<T>*>(block)->low_rank(linear).pack(rank, static_cast<const T*>(down), static_cast<const T*>(up),
                                                         static_cast<uint32_t*>(out));
  });
}
// May run beside a step in which no row uses the slot.
void ectl_block_write_low_rank(void* block, int dtype, int linear, int slot, int rank, const void* packed) {
  dispatch(dtype, [&](auto t) {
    static_cast<Block<decltype(t)>*>(block)->low_rank(linear).write(slot, rank, static_cast<const uint32_t*>(packed));
  });
}
void ectl_block_free(void* block, int dtype) {
  dispatch(dtype, [&](auto t) { delete static_cast<Block<decltype(t)>*>(block); });
}

void* ectl_head(OpSet* set, int dtype, const void* norm, const void* weight, int k, int n, float eps, int plus_one) {
  return made(set, [&] {
    return dispatch(dtype, [&](auto t) -> void* {
      using T = decltype(t);
      return new Head<T>(*set, static_cast<const T*>(norm), static_cast<const T*>(weight), k, n, eps, plus_one != 0);
    });
  });
}
int ectl_head_logits(OpSet* set, void* head, int dtype, const void* hidden, int num_rows, float* out) {
  return guarded(set, [&] {
    dispatch(dtype, [&](auto t) {
      using T = decltype(t);
      static_cast<Head<T>*>(head)->logits(static_cast<const T*>(hidden), num_rows, out);
    });
  });
}
int ectl_head_greedy(OpSet* set, void* head, int dtype, const void* hidden, int num_rows, int64_t* ids) {
  return guarded(set, [&] {
    dispatch(dtype, [&](auto t) {
      using T = decltype(t);
      static_cast<Head<T>*>(head)->greedy(static_cast<const T*>(hidden), num_rows, ids);
    });
  });
}
void ectl_head_free(void* head, int dtype) {
  dispatch(dtype, [&](auto t) { delete static_cast<Head<decltype(t)>*>(head); });
}

void* ectl_attention(int num_threads) { return new (std::nothrow) AttentionState(num_threads); }
void ectl_attention_free(void* state) { delete static_cast<AttentionState*>(state); }

// Memory that is read in no order reads twice as fast from huge pages. Only a wish, and only for pages not yet touched.
void ectl_prefer_huge_pages(void* start, size_t bytes) {
  constexpr size_t huge = size_t{2} << 20;
  const size_t from = (reinterpret_cast<size_t>(start) + huge - 1) / huge * huge;
  const size_t to = (reinterpret_cast<size_t>(start) + bytes) / huge * huge;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
}

int ectl_write_kv(AttentionState* state, const Layer* layer, const Step* step, int dtype, const void* k,
                  int64_t k_token, int64_t k_head, const void* v, int64_t v_token, int64_t v_head) {
  dispatch(dtype, [&](auto t) {
    using T = decltype(t);
    write_kv(*layer, *step, state->team, static_cast<const T*>(k), Strides{k_token, k_head}, static_cast<const T*>(v),
             Strides{v_token, v_head});
  });
  return 0;
}

int ectl_attend(AttentionState* state, const Layer* layer, const Step* step, int dtype, const void* q, int64_t q_token,
                int64_t q_head, const float* sinks, void* out) {
  try {
    const std::lock_guard<std::mutex> lock(state->busy);
    dispatch(dtype, [&](auto t) {
      using T = decltype(t);
      Attention<T>(*layer, *step, state->team, static_cast<const T*>(q), Strides{q_token, q_head}, sinks,
                   static_cast<T*>(out))
          .run(state->partial, state->work);
      announce<T>(layer->next, *step);
    });
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // extern "C"
