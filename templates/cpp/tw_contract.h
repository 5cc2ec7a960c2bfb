// Launch of a contraction group: several weights over the same input rows, with a prologue that makes
// the fp32 rows and one epilogue per section.
//
// A translation unit defines
//   struct Args                      what prologue and epilogues read and write
//   struct Rows                      static void row(const Args&, int64_t row, float* a) writes a[K], or with
//                                    Schedule::ROWS == DIRECT static const float* row(const Args&, int64_t row)
//   struct Section per output        N; type weights = tw::weight_list<tw::q4_1, ...>;
//                                    static const uint8_t* packed(const Args&, int weight_id);
//                                    static void epilogue(const Args&, int64_t row, int64_t col, int64_t width,
//                                                         const float* const* acc)
//   struct Problem                   K, ORDER, SEGMENTS; types args, rows, sections = tw::section_list<...>,
//                                    routing (tw_route.h): what a row number means, and which matrix it meets
//   struct Schedule                  FORM, ROW_TILE, PANEL_TILE, PANELS_PER_ITEM, ROW_BLOCK, K_BLOCK, PREFETCH,
//                                    ROWS, SPLIT, FEW_ROWS: no field of it can change a result bit
// and calls tw::contract<Problem, Schedule>(args, num_rows, workspace). tw_body, tw_parallel and tw_num_threads
// (tw_host.h) are declared before this file. The workspace holds, 64-byte aligned,
// workspace_bytes<Problem, Schedule>(num_rows, num_threads) bytes; what is in it does not matter.
#pragma once
#include "tw_contract_exact.h"
#include "tw_route.h"

namespace tw {

enum form { STREAM = 0, SLAB = 1 };                        // GEMV form, GEMM form
enum rows_mode { INLINE_ROWS = 0, PHASE = 1, DIRECT = 2 };  // prologue per thread, in a first phase, none
enum split { BY_ROWS = 0, BY_PANELS = 1 };                 // which of row block and panels is outermost

template <class... W> struct weight_list {
  static constexpr int COUNT = sizeof...(W);
};
template <class... S> struct section_list {};

template <class First, class...> struct first_of { using type = First; };
template <bool, class A, class> struct choose { using type = A; };
template <class A, class B> struct choose<false, A, B> { using type = B; };
template <class A, class B> struct same { static constexpr bool value = false; };
template <class A> struct same<A, A> { static constexpr bool value = true; };

template <class List> struct weights_of;
template <class... W> struct weights_of<weight_list<W...>> {
  using first = typename first_of<W...>::type;
  static constexpr bool UNIFORM = (same<first, W>::value && ...);
};

template <class List> struct sections_of;
template <class... S> struct sections_of<section_list<S...>> {
  using first = typename weights_of<typename first_of<S...>::type::weights>::first;
  static constexpr bool UNIFORM = ((weights_of<typename S::weights>::UNIFORM &&
                                    same<first, typename weights_of<typename S::weights>::first>::value) && ...);
  static constexpr int MAX_WEIGHTS = [] {
    int most = 0;
    ((most = S::weights::COUNT > most ? S::weights::COUNT : most), ...);
    return most;
  }();
  static constexpr int64_t items(int64_t panels_per_item) {
    return (ceil_div(ceil_div(S::N, 16), panels_per_item) + ...);
  }
};

// Sizes in bytes and elements that follow from the problem and the schedule.
template <class P, class S>
struct sizes {
  using lists = sections_of<typename P::sections>;
  using weight = typename lists::first;
  static constexpr bool FACTORS = P::ORDER == FACTORED && weight::HAS_SCALE;
  static constexpr bool SUMS = FACTORS && weight::HAS_MIN;
  static_assert(P::ORDER != FACTORED || lists::UNIFORM, "factored order: one weight format per launch");
  static_assert(!FACTORS || S::ROWS != DIRECT, "factored order rescales the rows: they cannot be read in place");
  static_assert(P::K % P::SEGMENTS == 0, "segments must divide K");
  static constexpr bool EXACT = P::ORDER == EXACTLY;
  using block = typename choose<S::FORM == SLAB, word_block, digit_block>::type;
  static_assert(!EXACT || (lists::UNIFORM && same<weight, fp4>::value && S::ROWS != DIRECT && P::SEGMENTS == 1),
                "exact order: fp4 weights, rows that are made, one segment");
  // Rows end with 16 floats of padding: the stride is no power of two, which spreads them over cache sets,
  // and the first row's padding remembers which row block a thread has made (`made`).
  static constexpr int64_t ROW_FLOATS = EXACT ? P::K / 32 * (int64_t)sizeof(block) / 4 : P::K;
  static constexpr int64_t STRIDE = ceil_div(ROW_FLOATS, 16) * 16 + 16;
  static constexpr int64_t MADE_OFFSET = (STRIDE - 16) * 4;
  static constexpr int64_t SUM_STRIDE = SUMS ? ceil_div(P::K / weight::GROUP, 16) * 16 : 0;
  static constexpr int64_t ROW_BYTES = (STRIDE + SUM_STRIDE) * 4;
  static constexpr int64_t ITEMS = lists::items(S::PANELS_PER_ITEM);
  static constexpr int64_t SCALE_FLOATS = FACTORS ? S::K_BLOCK / weight::GROUP * 32 : 0;
  static constexpr int64_t PANEL_SLAB_BYTES =
      EXACT ? S::K_BLOCK * 32 + S::K_BLOCK / 32 * 64 : (S::K_BLOCK * 16 + SCALE_FLOATS) * 4;
  static constexpr int64_t SLAB_BYTES = S::FORM == SLAB ? S::PANEL_TILE * PANEL_SLAB_BYTES : 0;
  static constexpr int64_t ACC_FLOATS = (S::ROW_BLOCK + S::ROW_TILE) * S::PANEL_TILE * 16;
  static constexpr int64_t ACC_BYTES =
      S::FORM == SLAB ? ACC_FLOATS * (lists::MAX_WEIGHTS + (P::SEGMENTS > 1 ? 1 : 0)) * 4 : 0;
  static constexpr int64_t OWN_ROWS_BYTES = S::ROWS == INLINE_ROWS ? S::ROW_BLOCK * ROW_BYTES : 0;
  static constexpr int64_t THREAD_BYTES = OWN_ROWS_BYTES + SLAB_BYTES + ACC_BYTES;
  using routing = typename P::routing;
  // Rows of results and rows of activations, for so many tokens.
  static constexpr int64_t results(int64_t num_tokens) { return num_tokens * routing::SLOTS; }
  static constexpr int64_t sources(int64_t num_tokens) { return routing::SHARED ? num_tokens : results(num_tokens); }
  static constexpr int64_t route_bytes(int64_t num_tokens) {
    return routing::KIND == EXPERTS ? tw::route_bytes(results(num_tokens), routing::COUNT) : 0;
  }
  static constexpr int64_t shared_bytes(int64_t num_tokens) {
    return route_bytes(num_tokens) + (S::ROWS == PHASE ? sources(num_tokens) * ROW_BYTES : 0);
  }
};

template <class P, class S>
constexpr int64_t workspace_bytes(int64_t num_rows, int64_t num_threads) {
  return sizes<P, S>::shared_bytes(num_rows) + num_threads * sizes<P, S>::THREAD_BYTES;
}

// Sum the groups of one row (each in order, from +0; all groups side by side, since one sum is a chain of
// dependent additions), then rescale the row in place for the factored order.
template <class W, int64_t K>
static inline void factor_row(float* a, float* sums) {
  if (sums) {
    for (int64_t g = 0; g < K / W::GROUP; ++g) sums[g] = 0.0f;
    for (int i = 0; i < W::GROUP; ++i)
      for (int64_t g = 0; g < K / W::GROUP; ++g) sums[g] += a[g * W::GROUP + i];
  }
  for (int64_t g = 0; g < K / W::GROUP; ++g)
    for (int i = 0; i < W::GROUP; ++i) a[g * W::GROUP + i] *= W::prescale(i / W::WORDS);
}

template <class P, class S>
struct launch {
  using Z = sizes<P, S>;
  using Args = typename P::args;
  using R_ = typename P::routing;
  const Args* args;
  int64_t num_rows;  // tokens
  uint8_t* workspace;
  routes route;

  // What one thread works with: `count` rows, from row0 on or listed in `ids`, of one matrix. They are in
  // `rows` by their place in the block (INLINE_ROWS) or by the number of their source, or behind Rows::row.
  struct view {
    const Args* args;
    int64_t row0, count, panel0, panel1, matrix;
    const int32_t* ids;
    const float* rows;
    float* scratch;
  };

  // The number of a block's row among all results, and the row of the activation it comes from.
  static TW_INLINE int64_t row_id(const view& v, int64_t i) {
    if constexpr (R_::KIND == EXPERTS) return v.ids[i];
    return R_::KIND == GROUPS ? (v.row0 + i) * R_::SLOTS + v.matrix : v.row0 + i;
  }
  static TW_INLINE int64_t source_of(int64_t row) { return R_::SHARED ? row / R_::SLOTS : row; }

  int64_t num_blocks() const {
    if constexpr (R_::KIND == EXPERTS) return route.num_blocks;
    return ceil_div(num_rows, S::ROW_BLOCK) * R_::COUNT;
  }

  void enter_block(view& v, int64_t block) const {
    if constexpr (R_::KIND == EXPERTS) {
      v.matrix = route.blocks[block].matrix;
      v.ids = route.order + route.blocks[block].first;
      v.count = route.blocks[block].count;
    } else {
      const int64_t per_matrix = ceil_div(num_rows, S::ROW_BLOCK);
      v.matrix = block / per_matrix;
      v.row0 = block % per_matrix * S::ROW_BLOCK;
      v.count = num_rows - v.row0 < S::ROW_BLOCK ? num_rows - v.row0 : S::ROW_BLOCK;
    }
  }

  template <class Section, class W>
  static TW_INLINE const uint8_t* packed(const view& v, int weight_id) {
    const uint8_t* first = Section::packed(*v.args, weight_id);
    return R_::COUNT > 1 ? first + v.matrix * ceil_div(Section::N, 16) * panel_bytes<W>(P::K) : first;
  }

  static int64_t& made_block(uint8_t* own) { return *(int64_t*)(own + Z::MADE_OFFSET); }

  static void make_row(const Args& args, int64_t row, float* a) {
    if constexpr (Z::EXACT) {
      alignas(64) float values[P::K];
      P::rows::row(args, row, values);
      for (int64_t g = 0; g < P::K / 32; ++g) make_block(values + 32 * g, (typename Z::block*)a + g);
      return;
    }
    P::rows::row(args, row, a);
    if constexpr (Z::FACTORS) factor_row<typename Z::weight, P::K>(a, Z::SUMS ? a + Z::STRIDE : nullptr);
  }

  // Rows beyond the last repeat it: their results are never read.
  template <int R>
  static TW_INLINE row_tile<R> tile_rows(const view& v, int64_t first) {
    row_tile<R> tile;
    for (int r = 0; r < R; ++r) {
      const int64_t i = first + r < v.count ? first + r : v.count - 1;
      if constexpr (S::ROWS == DIRECT)
        tile.a[r] = P::rows::row(*v.args, source_of(row_id(v, i)));
      else
        tile.a[r] = v.rows + (S::ROWS == PHASE ? source_of(row_id(v, i)) : i) * (Z::ROW_BYTES / 4);
      tile.sums[r] = tile.a[r] + Z::STRIDE;
    }
    return tile;
  }

  // Call body(row-tile size, first row) over the rows of a block; the last tile is the smallest of R, R / 2
  // and 1 that covers the rest.
  template <int R, class F>
  static TW_INLINE void each_row_tile(int64_t count, F&& body) {
    constexpr int HALF = R > 3 ? R / 2 : R;
    int64_t i = 0;
    for (; count - i > HALF; i += R) body(size_constant<R>{}, i);
    if (count - i > 1) {
      body(size_constant<HALF>{}, i);
    } else if (count - i == 1) {
      body(size_constant<1>{}, i);
    }
  }
  template <int V> struct size_constant { static constexpr int value = V; };

  template <class Section, int PT>
  static TW_INLINE void finish_row(const view& v, int64_t row, int64_t panel, const float* const* acc) {
    for (int p = 0; p < PT; ++p) {
      const float* piece[Section::weights::COUNT];
      for (int i = 0; i < Section::weights::COUNT; ++i) piece[i] = acc[i] + p * 16;
      const int64_t col = (panel + p) * 16;
      Section::epilogue(*v.args, row_id(v, row), col, Section::N - col < 16 ? Section::N - col : 16, piece);
    }
  }

  // ---- STREAM: weights are decoded in registers for every row tile.
  template <class W, int R, int PT>
  static TW_INLINE void stream_weight(const uint8_t* panel, const row_tile<R>& rows, float* acc) {
    if constexpr (Z::EXACT)
      exact_tile<typename Z::block, R, PT, S::PREFETCH, P::K>(panel, rows, acc);
    else
      stream_tile<W, R, PT, S::PREFETCH, P::ORDER, P::K, P::SEGMENTS>(panel, rows, acc);
  }

  template <class Section, int PT, int RT, class... W>
  static TW_INLINE void stream_panels(const view& v, int64_t panel, weight_list<W...>) {
    each_row_tile<RT>(v.count, [&](auto size, int64_t first) __attribute__((always_inline)) {
      constexpr int R = decltype(size)::value;
      alignas(64) float acc[sizeof...(W)][R * PT * 16];
      const row_tile<R> rows = tile_rows<R>(v, first);
      int i = 0;
      ((stream_weight<W, R, PT>(packed<Section, W>(v, i) + panel * panel_bytes<W>(P::K), rows, acc[i]), ++i), ...);
      for (int r = 0; r < R && first + r < v.count; ++r) {
        const float* row_acc[sizeof...(W)];
        for (unsigned w = 0; w < sizeof...(W); ++w) row_acc[w] = acc[w] + r * PT * 16;
        finish_row<Section, PT>(v, first + r, panel, row_acc);
      }
    });
  }

  // ---- SLAB: a block of k of PT panels is decoded once and used by all rows of the block.
  template <class W, int PT>
  static void slab_weight(const view& v, const uint8_t* packed, int64_t panel, float* acc, float* total) {
    static_assert(S::K_BLOCK % W::GROUP == 0, "K block must hold whole groups");
    float* value = v.scratch;  // word_pairs, where sums are exact
    float* scale = value + S::PANEL_TILE * S::K_BLOCK * (Z::EXACT ? 8 : 16);
    const uint8_t* first_panel = packed + panel * panel_bytes<W>(P::K);
    constexpr int64_t length = P::K / P::SEGMENTS;
    for (int segment = 0; segment < P::SEGMENTS; ++segment) {
      const int64_t begin = segment * length, end = begin + length;
      float* out = P::SEGMENTS > 1 ? total : acc;
      for (int64_t k0 = begin; k0 < end; k0 += S::K_BLOCK) {
        const int64_t k1 = k0 + S::K_BLOCK < end ? k0 + S::K_BLOCK : end;
        if constexpr (Z::EXACT)
          fill_exact_slab<PT, S::K_BLOCK>(first_panel, panel_bytes<W>(P::K), k0, k1, (word_pairs*)value, scale);
        else
          fill_slab<W, P::ORDER, PT, S::K_BLOCK>(first_panel, panel_bytes<W>(P::K), k0, k1, value, scale);
        each_row_tile<S::ROW_TILE>(v.count, [&](auto size, int64_t first) __attribute__((always_inline)) {
          constexpr int R = decltype(size)::value;
          const row_tile<R> rows = tile_rows<R>(v, first);
          float* tile = out + first * PT * 16;
          if constexpr (Z::EXACT)
            slab_exact<R, PT, S::K_BLOCK>((const word_pairs*)value, scale, rows, k0, k1 - k0, k0 == begin, tile);
          else if constexpr (P::ORDER == FACTORED && W::HAS_SCALE)
            slab_factored<W, R, PT, S::K_BLOCK>(value, scale, rows, k0, k1 - k0, k0 == begin, tile);
          else
            slab_dequantise<R, PT, S::K_BLOCK>(value, rows, k0, k1 - k0, k0 == begin, tile);
        });
      }
      if constexpr (P::SEGMENTS > 1)
        for (int64_t i = 0; i < v.count * PT * 16; i += 16)
          store(acc + i, segment == 0 ? load(total + i) : add(load(acc + i), load(total + i)));
    }
  }

  template <class Section, int PT, class... W>
  static void slab_panels(const view& v, int64_t panel, weight_list<W...>) {
    float* acc0 = v.scratch + Z::SLAB_BYTES / 4;
    float* total = acc0 + Z::lists::MAX_WEIGHTS * Z::ACC_FLOATS;
    int i = 0;
    ((slab_weight<W, PT>(v, packed<Section, W>(v, i), panel, acc0 + i * Z::ACC_FLOATS, total), ++i), ...);
    for (int64_t r = 0; r < v.count; ++r) {
      const float* row_acc[sizeof...(W)];
      for (unsigned w = 0; w < sizeof...(W); ++w) row_acc[w] = acc0 + w * Z::ACC_FLOATS + r * PT * 16;
      finish_row<Section, PT>(v, r, panel, row_acc);
    }
  }

  // ---- Rows of no matrix.
  template <class Section>
  static void unknown_panels(const view& v, int64_t end) {
    alignas(64) float nan[16];
    const float* acc[Section::weights::COUNT];
    store(nan, set1(__builtin_nanf("")));
    for (const float*& each : acc) each = nan;
    for (int64_t panel = v.panel0; panel < end; ++panel)
      for (int64_t r = 0; r < v.count; ++r) finish_row<Section, 1>(v, r, panel, acc);
  }

  template <class Section, int FORM, int PT, int RT>
  static TW_INLINE void panels(const view& v, int64_t panel) {
    if constexpr (FORM == STREAM)
      stream_panels<Section, PT, RT>(v, panel, typename Section::weights{});
    else
      slab_panels<Section, PT>(v, panel, typename Section::weights{});
  }

  template <class Section, int FORM, int PT, int RT>
  static TW_INLINE void walk_panels(const view& v, int64_t end) {
    int64_t panel = v.panel0;
    for (; panel + PT <= end; panel += PT) panels<Section, FORM, PT, RT>(v, panel);
    if constexpr (PT > 1)
      for (; panel < end; ++panel) panels<Section, FORM, 1, RT>(v, panel);
  }

  template <class Section>
  static void section_item(const view& v) {
    const int64_t num_panels = ceil_div(Section::N, 16);
    const int64_t end = v.panel1 < num_panels ? v.panel1 : num_panels;
    if constexpr (R_::KIND == EXPERTS)
      if (v.matrix == R_::COUNT) return unknown_panels<Section>(v, end);
    if constexpr (S::FORM == SLAB && S::FEW_ROWS > 0)  // blocks of a routed problem differ in size
      if (v.count <= S::FEW_ROWS) return walk_panels<Section, STREAM, 2, 2>(v, end);
    walk_panels<Section, S::FORM, S::PANEL_TILE, S::ROW_TILE>(v, end);
  }

  template <class... Section>
  static void item(view v, int64_t item_id, section_list<Section...>) {
    (([&] {
       const int64_t count = ceil_div(ceil_div(Section::N, 16), S::PANELS_PER_ITEM);
       if (item_id >= 0 && item_id < count) {
         v.panel0 = item_id * S::PANELS_PER_ITEM;
         v.panel1 = v.panel0 + S::PANELS_PER_ITEM;
         section_item<Section>(v);
       }
       item_id -= count;
     }()),
     ...);
  }

  static void items_body(void* arg, int64_t begin, int64_t end, int thread_id) {
    const launch& self = *(const launch*)arg;
    const int64_t blocks = self.num_blocks();
    uint8_t* shared = self.workspace + Z::route_bytes(self.num_rows);
    uint8_t* own = self.workspace + Z::shared_bytes(self.num_rows) + thread_id * Z::THREAD_BYTES;
    view v = {};
    v.args = self.args;
    v.scratch = (float*)(own + Z::OWN_ROWS_BYTES);
    v.rows = (const float*)(S::ROWS == INLINE_ROWS ? own : shared);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = S::SPLIT == BY_ROWS ? i / Z::ITEMS : i % blocks;
      self.enter_block(v, block);
      if constexpr (S::ROWS == INLINE_ROWS) {
        int64_t& made = made_block(own);
        if (made != block)
          for (int64_t r = 0; r < v.count; ++r)
            make_row(*v.args, source_of(row_id(v, r)), (float*)(own + r * Z::ROW_BYTES));
        made = block;
      }
      item(v, S::SPLIT == BY_ROWS ? i % Z::ITEMS : i / blocks, typename P::sections{});
    }
  }

  static void rows_body(void* arg, int64_t begin, int64_t end, int) {
    const launch& self = *(const launch*)arg;
    uint8_t* shared = self.workspace + Z::route_bytes(self.num_rows);
    for (int64_t row = begin; row < end; ++row)
      make_row(*self.args, row, (float*)(shared + row * Z::ROW_BYTES));
  }
};

// Run all work items. No rows: nothing is read or written.
template <class P, class S>
static void contract(const typename P::args& args, int64_t num_rows, uint8_t* workspace) {
  using L = launch<P, S>;
  if (num_rows <= 0) return;
  using Z = sizes<P, S>;
  L self = {&args, num_rows, workspace, {}};
  if constexpr (P::routing::KIND == EXPERTS)
    self.route = sort_slots(P::routing::ids(args), Z::results(num_rows), P::routing::COUNT, S::ROW_BLOCK, workspace);
  if constexpr (S::ROWS == PHASE) tw_parallel(Z::sources(num_rows), L::rows_body, &self);
  if constexpr (S::ROWS == INLINE_ROWS)
    for (int t = 0; t < tw_num_threads(); ++t)
      L::made_block(workspace + Z::shared_bytes(num_rows) + t * Z::THREAD_BYTES) = -1;
  tw_parallel(self.num_blocks() * Z::ITEMS, L::items_body, &self);
}

}  // namespace tw
