// Schedules, tiles and workspace of latent attention: see tw_latent.h.
#pragma once
#include "tw_latent_tile.h"

namespace tw {

enum class entries { none, all, selected };

struct latent_schedule {
  int64_t tile_tokens;    // most tokens of a tile: neighbours in one request
  int64_t head_panels;    // panels of sixteen heads of an item
  int64_t split_units;    // units of a range; 0: tiles are not split
  int64_t partial_bytes;  // most workspace for split tiles; a tile that does not fit is not split
  int64_t width_panels;   // panels of columns that a pass over the scores walks
  int64_t ahead;          // rows asked from memory before they are decoded
  int64_t inline_units;   // a launch of at most so many units, counted per panel of heads, is a single work item
};

struct latent_tile {
  int64_t token, count, num_units, num_ranges;
  int64_t first_item, first_partial;
};

template <class P>
struct latent_sizes {
  static constexpr int HEAD_PANELS = (P::HEADS + HEAD_LANES - 1) / HEAD_LANES, PANELS = (P::WIDTH + 15) / 16;
  static constexpr int COLUMNS = PANELS * 16;
  static constexpr int64_t OUT = HEAD_LANES * COLUMNS, PARTIAL = OUT + 2 * HEAD_LANES, PARTIAL_BYTES = PARTIAL * 4;
  static constexpr int64_t SHARED_MOST = 512;  // rows of several windows that are kept decoded

  // Rows of decoded entries: those of a unit, or of the windows of a tile; register tiles may pass the end.
  static constexpr int64_t shared_rows(const latent_schedule& s) {
    const int64_t rows = P::WINDOW + s.tile_tokens - 1;
    return s.tile_tokens > 1 && rows <= SHARED_MOST ? rows : 0;
  }
  static constexpr int64_t panel_floats(int64_t rows) { return (rows + MOST_ROWS + 1) * 16; }
  static constexpr int64_t thread_bytes(const latent_schedule& s) {
    const int64_t heads = OUT * 2 + (P::CHUNK + MOST_ROWS) * HEAD_LANES + 6 * HEAD_LANES;
    const int64_t shared = shared_rows(s), most = shared > P::CHUNK ? shared : P::CHUNK;
    const int64_t keys = panel_floats(P::CHUNK) * PANELS + (shared ? panel_floats(shared) * PANELS : 0);
    return (s.head_panels * heads + keys + OUT) * 4 + (most + 7) / 8 * 64;
  }
  static constexpr int64_t tile_bytes(int64_t num_tokens) {
    return (num_tokens * (int64_t)sizeof(latent_tile) + 63) / 64 * 64;
  }
  static constexpr int64_t units(int64_t entries) { return (entries + P::CHUNK - 1) / P::CHUNK; }
  static constexpr int64_t partials(const latent_schedule& s, int64_t num_tokens, int64_t most_entries) {
    if (s.split_units == 0) return 0;
    const int64_t wanted = num_tokens * HEAD_PANELS * (units(P::WINDOW) + units(most_entries));
    const int64_t most = s.partial_bytes / PARTIAL_BYTES;
    return wanted < most ? wanted : most;
  }
};

// Bytes of workspace, 64-byte aligned; most_entries: of the second list of a token.
template <class P>
constexpr int64_t latent_bytes(const latent_schedule& schedule, int64_t num_tokens, int64_t most_entries,
                               int64_t num_threads) {
  using Z = latent_sizes<P>;
  return Z::tile_bytes(num_tokens) + Z::partials(schedule, num_tokens, most_entries) * Z::PARTIAL_BYTES +
         num_threads * Z::thread_bytes(schedule);
}

}  // namespace tw
