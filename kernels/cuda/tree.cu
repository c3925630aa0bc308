// The irregular part of a step: which offered nodes are expanded, which are kept, how they are numbered, and the
// verification walk. One block per request, nothing between blocks, no atomics: the same input gives the same bits.
//
// Order. "Best" is score descending, then index ascending; the index of an offered node is its place in (level,
// parent's rank, slot). Only the *set* of the best is needed to number a tree, so nothing is sorted: the smallest key
// of the set is found bit by bit, one counting barrier each (__syncthreads_count is one instruction), and a prefix sum
// places the set in index order. For n nodes, a thread each, that is at most 33 + log2(n) barriers (65 + log2(n) for
// float64) and as many steps per thread. Counting how many nodes precede each takes n steps per thread; a bitonic sort
// of 1024 takes 55 barriers with loads and stores of shared memory between all of them. Only the beam is then ranked by
// counting, among itself.
//
// Plain C++ and barriers, no warp intrinsics, any block size that holds count <= MAX_PER_THREAD * blockDim.x: the same
// source compiles with g++, where the tests run it.

constexpr int MAX_THREADS = 1024;
constexpr int MAX_PER_THREAD = 8;
constexpr int MAX_OFFERED = MAX_THREADS * MAX_PER_THREAD;
constexpr int MAX_BEAM = 1024;
constexpr int MAX_ROWS = 1024;  // root included
constexpr int MAX_DEPTH = 64;

typedef long long int64;
typedef unsigned char boolean;

// Keys that compare as the scores do: -0 equals +0, NaN is the greatest, as torch.sort has it. 0 is no score's key.
template <typename Score> struct Order;

template <> struct Order<float> {
    typedef unsigned Key;
    static constexpr Key TOP = 1u << 31, NAN_KEY = ~0u, LOWEST = ~0xff800000u;  // the key of -inf

    static __device__ __forceinline__ Key key(float score) {
        if (score != score) return NAN_KEY;
        Key bits = __float_as_uint(score);
        if ((bits << 1) == 0) bits = 0;  // by its bits: CuPy compiles with -ftz, which takes subnormal numbers for 0
        return bits & TOP ? ~bits : bits | TOP;
    }
};

template <> struct Order<double> {
    typedef unsigned long long Key;
    static constexpr Key TOP = 1ull << 63, NAN_KEY = ~0ull, LOWEST = ~0xfff0000000000000ull;

    static __device__ __forceinline__ Key key(double score) {
        if (score != score) return NAN_KEY;
        Key bits = (Key)__double_as_longlong(score == 0.0 ? 0.0 : score);
        return bits & TOP ? ~bits : bits | TOP;
    }
};

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }

template <int PER_THREAD, typename Key>
__device__ __forceinline__ int count_reaching(const Key (&keys)[PER_THREAD], Key bound) {
    int mine = 0;
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) mine += keys[k] >= bound;
    if (PER_THREAD == 1) return __syncthreads_count(mine);
    int total = 0;
    for (int bit = 1; bit <= PER_THREAD; bit <<= 1) total += bit * __syncthreads_count((mine & bit) != 0);
    return total;
}

// Sum of `mine` over the threads before this one; `total` over all.
__device__ __forceinline__ unsigned sum_before(unsigned mine, unsigned (&sums)[2][MAX_THREADS], unsigned& total) {
    const int thread = threadIdx.x;
    int from = 0;
    sums[0][thread] = mine;
    __syncthreads();
    for (int step = 1; step < (int)blockDim.x; step <<= 1) {
        unsigned sum = sums[from][thread];
        if (thread >= step) sum += sums[from][thread - step];
        from ^= 1;
        sums[from][thread] = sum;
        __syncthreads();
    }
    total = sums[from][blockDim.x - 1];
    return sums[from][thread] - mine;
}

// Finds the best `size` <= count of the scores and writes them in index order: kept[1 ..]. `row_of`, where given, is
// the inverse: 0 for what is not kept. Nodes without a finite score take places but are kept only on request. Returns
// how many are kept. A barrier must follow before the tables are read.
template <int PER_THREAD, typename Score>
__device__ int keep_best(
    const Score* scores, int count, int size, bool keep_invalid, unsigned (&sums)[2][MAX_THREADS], int* kept,
    unsigned short* row_of) {
    typedef Order<Score> By;
    typedef typename By::Key Key;
    const int first = threadIdx.x * PER_THREAD;  // neighbours in one thread: a sum over threads is then in index order
    Key keys[PER_THREAD];
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) keys[k] = first + k < count ? By::key(scores[first + k]) : Key(0);

    Key cut = 0;  // in the end the greatest key that at least `size` scores reach
    for (Key bit = By::TOP; bit; bit >>= 1) {
        const int reaching = count_reaching<PER_THREAD>(keys, Key(cut | bit));
        if (reaching >= size) cut |= bit;
        if (reaching == size) break;
    }
    const int above = cut == By::NAN_KEY ? 0 : count_reaching<PER_THREAD>(keys, Key(cut + 1));
    const int room = size - above;  // for those at the cut, the lowest indices first

    unsigned mine = 0;  // above the cut in the low half, at the cut in the high half
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
        const bool counts = keep_invalid || (keys[k] > By::LOWEST && keys[k] != By::NAN_KEY);
        mine += counts ? (unsigned)(keys[k] > cut) + ((unsigned)(keys[k] == cut) << 16) : 0u;
    }
    unsigned total;
    const unsigned before = sum_before(mine, sums, total);
    int over = before & 0xffff, tied = before >> 16;
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
        const bool counts = keep_invalid || (keys[k] > By::LOWEST && keys[k] != By::NAN_KEY);
        const bool keep = counts && (keys[k] > cut || (keys[k] == cut && tied < room));
        const int row = 1 + over + least(tied, room);
        over += counts && keys[k] > cut;
        tied += counts && keys[k] == cut;
        if (keep) kept[row] = first + k;
        if (row_of && first + k < count) row_of[first + k] = keep ? row : 0;
    }
    return (total & 0xffff) + least(total >> 16, room);
}

template <typename Score>
__device__ __forceinline__ int keep_best_of(
    const Score* scores, int count, int size, bool keep_invalid, unsigned (&sums)[2][MAX_THREADS], int* kept,
    unsigned short* row_of) {
    if (count <= (int)blockDim.x) return keep_best<1>(scores, count, size, keep_invalid, sums, kept, row_of);
    return keep_best<MAX_PER_THREAD>(scores, count, size, keep_invalid, sums, kept, row_of);
}

template <typename Score> struct BeamTables {
    unsigned sums[2][MAX_THREADS];
    int kept[MAX_BEAM + 1];
    typename Order<Score>::Key keys[MAX_BEAM];
};

template <typename Score>
__device__ void select_beam(
    BeamTables<Score>& tables, const Score* scores, int64 score_stride, const int64* offered_tokens, int64 token_stride,
    int count, int beam, int branching, int64* best, int64 best_stride, Score* best_scores, int64* token_ids,
    int64* parents, boolean* valid) {
    const int64 request = blockIdx.x;
    scores += request * score_stride;
    offered_tokens += request * token_stride;
    keep_best_of(scores, count, beam, true, tables.sums, tables.kept, (unsigned short*)nullptr);
    __syncthreads();
    for (int place = threadIdx.x; place < beam; place += blockDim.x)
        tables.keys[place] = Order<Score>::key(scores[tables.kept[place + 1]]);
    __syncthreads();
    for (int place = threadIdx.x; place < beam; place += blockDim.x) {
        const typename Order<Score>::Key key = tables.keys[place];
        int rank = 0;
        for (int other = 0; other < beam; ++other)
            rank += tables.keys[other] > key || (tables.keys[other] == key && other < place);
        const int index = tables.kept[place + 1];
        const Score score = scores[index];
        const bool exists = key > Order<Score>::LOWEST && key != Order<Score>::NAN_KEY;
        best[request * best_stride + rank] = index;
        best_scores[request * beam + rank] = score;
        token_ids[request * beam + rank] = exists ? offered_tokens[index] : 0;
        parents[request * beam + rank] = exists ? index / branching : 0;
        valid[request * beam + rank] = exists;
    }
}

// Where an expanded node stands: the level it offers (1 for the root), and the first expanded node of the level above.
struct Place {
    int level, first_above;
};

__device__ __forceinline__ Place place_of(int expanded, int beam, int branching) {
    int level = 1, first = 0, first_above = 0, width = 1;
    while (expanded >= first + width) {
        first_above = first;
        first += width;
        width = least(beam, width * branching);
        ++level;
    }
    return {level, first_above};
}

struct TreeTables {
    unsigned sums[2][MAX_THREADS];
    int kept[MAX_ROWS];
    unsigned short row_of[MAX_OFFERED];
    short parent[MAX_ROWS];
    unsigned short probe[MAX_ROWS];
};

template <typename Score>
__device__ void prune_tree(
    TreeTables& tables, const int64* offered_tokens, const Score* offered_scores, const boolean* offered_probes,
    const int64* expanded_offers, const boolean* failed, int count, int size, int beam, int branching, int64* token_ids,
    int64* parents, int64* depths, int64* slots, boolean* is_probe, double* log_scores, int64* num_nodes,
    int64* law_index, unsigned long long* ancestors, int64* probe_row, boolean* draft_failed) {
    const int64 request = blockIdx.x;
    const int rows = size + 1, expanded_count = count / branching;
    offered_tokens += request * count;
    offered_scores += request * count;
    offered_probes += request * count;
    expanded_offers += request * (expanded_count - 1);
    failed += request * expanded_count;
    const int64 first_row = request * rows;

    for (int row = threadIdx.x; row < rows; row += blockDim.x) tables.probe[row] = 0;
    const int kept =
        keep_best_of(offered_scores, count, size, false, tables.sums, tables.kept, (unsigned short*)tables.row_of);
    __syncthreads();

    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        const bool exists = row > 0 && row <= kept;
        int parent = -1, level = 0, slot = 0;
        int64 token = row == 0 ? -1 : 0;
        double score = row == 0 ? 0.0 : -__longlong_as_double(0x7ff0000000000000ll);
        bool probe = false;
        if (exists) {
            const int index = tables.kept[row], expanded = index / branching;
            const Place place = place_of(expanded, beam, branching);
            level = place.level;
            slot = index - expanded * branching;
            parent =
                expanded ? tables.row_of[place.first_above * branching + (int)expanded_offers[expanded - 1]] : 0;
            token = offered_tokens[index];
            score = offered_scores[index];
            probe = offered_probes[index];
            if (probe) tables.probe[parent] = row;  // a node has one probe, so one writer
        }
        tables.parent[row] = parent;
        token_ids[first_row + row] = token;
        parents[first_row + row] = parent;
        depths[first_row + row] = level;
        slots[first_row + row] = slot;
        is_probe[first_row + row] = probe;
        log_scores[first_row + row] = score;
    }

    // The draft failed if it failed at a node that was really there to be expanded.
    bool fails = false;
    for (int expanded = threadIdx.x; expanded < expanded_count; expanded += blockDim.x)
        if (failed[expanded]) {
            if (expanded == 0) {
                fails = true;
            } else {
                const int above = place_of(expanded, beam, branching).first_above * branching;
                const typename Order<Score>::Key key =
                    Order<Score>::key(offered_scores[above + (int)expanded_offers[expanded - 1]]);
                fails = fails || (key > Order<Score>::LOWEST && key != Order<Score>::NAN_KEY);
            }
        }
    const int failures = __syncthreads_count(fails);  // also the barrier behind tables.parent and tables.probe
    if (threadIdx.x == 0) {
        num_nodes[request] = kept + 1;
        draft_failed[request] = failures > 0;
    }

    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        const int probe = tables.probe[row];
        probe_row[first_row + row] = probe;
        law_index[first_row + row] = probe ? tables.kept[probe] / branching : -1;
    }
    const int words = (rows + 63) / 64;
    for (int item = threadIdx.x; item < rows * words; item += blockDim.x) {
        const int row = item / words, word = item - row * words;
        unsigned long long bits = word == 0;  // everybody sees the root, padding too
        for (int step = row; step > 0; step = tables.parent[step])
            if (step / 64 == word) bits |= 1ull << (step % 64);
        ancestors[first_row * words + item] = bits;
    }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) select_beam_f32(
    const float* scores, int64 score_stride, const int64* offered_tokens, int64 token_stride, int count, int beam,
    int branching, int64* best, int64 best_stride, float* best_scores, int64* token_ids, int64* parents,
    boolean* valid) {
    __shared__ BeamTables<float> tables;
    select_beam<float>(
        tables, scores, score_stride, offered_tokens, token_stride, count, beam, branching, best, best_stride,
        best_scores, token_ids, parents, valid);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) select_beam_f64(
    const double* scores, int64 score_stride, const int64* offered_tokens, int64 token_stride, int count, int beam,
    int branching, int64* best, int64 best_stride, double* best_scores, int64* token_ids, int64* parents,
    boolean* valid) {
    __shared__ BeamTables<double> tables;
    select_beam<double>(
        tables, scores, score_stride, offered_tokens, token_stride, count, beam, branching, best, best_stride,
        best_scores, token_ids, parents, valid);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) prune_tree_f32(
    const int64* offered_tokens, const float* offered_scores, const boolean* offered_probes,
    const int64* expanded_offers, const boolean* failed, int count, int size, int beam, int branching, int64* token_ids,
    int64* parents, int64* depths, int64* slots, boolean* is_probe, double* log_scores, int64* num_nodes,
    int64* law_index, unsigned long long* ancestors, int64* probe_row, boolean* draft_failed) {
    __shared__ TreeTables tables;
    prune_tree<float>(
        tables, offered_tokens, offered_scores, offered_probes, expanded_offers, failed, count, size, beam, branching,
        token_ids, parents, depths, slots, is_probe, log_scores, num_nodes, law_index, ancestors, probe_row,
        draft_failed);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) prune_tree_f64(
    const int64* offered_tokens, const double* offered_scores, const boolean* offered_probes,
    const int64* expanded_offers, const boolean* failed, int count, int size, int beam, int branching, int64* token_ids,
    int64* parents, int64* depths, int64* slots, boolean* is_probe, double* log_scores, int64* num_nodes,
    int64* law_index, unsigned long long* ancestors, int64* probe_row, boolean* draft_failed) {
    __shared__ TreeTables tables;
    prune_tree<double>(
        tables, offered_tokens, offered_scores, offered_probes, expanded_offers, failed, count, size, beam, branching,
        token_ids, parents, depths, slots, is_probe, log_scores, num_nodes, law_index, ancestors, probe_row,
        draft_failed);
}

// The walk needs one row after the other, but what happens at a row does not depend on how the walk came there: every
// row finds its next row first, all at once, and one thread follows the chain through shared memory.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) walk(
    const int64* token_ids, const int64* parents, const int64* probe_row, const boolean* accepts, const int64* drawn,
    const int64* lead_drawn, int rows, int width, int leads_first, int64* emitted, int64* walked, int64* counts,
    boolean* probes_offered, boolean* probes_accepted) {
    __shared__ unsigned short match[MAX_ROWS];  // the child that holds the drawn token, 0 for none
    __shared__ unsigned short lead[MAX_ROWS];   // the lead that holds the token drawn before the probe is tested
    __shared__ unsigned short next[MAX_ROWS];
    __shared__ short path[MAX_DEPTH + 2];
    const int64 request = blockIdx.x, first_row = request * rows, first = request * width;
    token_ids += first_row;
    parents += first_row;
    probe_row += first_row;
    accepts += first_row;
    drawn += first_row;
    lead_drawn += first_row;

    for (int row = threadIdx.x; row < rows; row += blockDim.x) match[row] = lead[row] = 0;
    __syncthreads();
    for (int child = threadIdx.x; child < rows; child += blockDim.x) {
        const int parent = (int)parents[child];
        if (parent < 0) continue;
        const int probe = (int)probe_row[parent];
        const int64 token = token_ids[child];
        // Siblings hold distinct tokens, so at most one thread writes each of these.
        if (child != probe && token == drawn[parent]) match[parent] = child;
        if (leads_first && child < probe && token == lead_drawn[parent]) lead[parent] = child;
    }
    __syncthreads();
    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        const int probe = (int)probe_row[row];
        next[row] = lead[row] ? lead[row] : probe && accepts[row] ? probe : match[row];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int row = 0, count = 0;
        do {
            path[count++] = row;
            row = next[row];
        } while (row && count < width);
        for (int column = count; column < width; ++column) path[column] = -1;
        counts[request] = count;
    }
    __syncthreads();
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
        const int row = path[column];
        int64 token = -1;
        bool offered = false, accepted = false;
        if (row >= 0) {
            const int probe = (int)probe_row[row];
            offered = probe > 0;
            accepted = offered && accepts[row] && !lead[row];
            token = lead[row] ? lead_drawn[row] : accepted ? token_ids[probe] : drawn[row];
        }
        emitted[first + column] = token;
        walked[first + column] = row;
        probes_offered[first + column] = offered;
        probes_accepted[first + column] = accepted;
    }
}
