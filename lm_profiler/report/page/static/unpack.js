// Reads what page.py has packed: bytes compressed by LZMA, seven bits of them a character, so that a page holds plotly and
// a hundred runs in two megabytes. Browsers have gzip of their own, which takes 1.4 times as much, and for text base64
// (1.33 characters a byte; this has 1.17).
//
// The format is Igor Pavlov's (LZMA specification, in the public domain), here without a header, with lc = 3, lp = pb = 0.

const HALF = 1024; // of 2048: each bit is as likely as not, until more is known of it
const likelihoods = (count) => new Uint16Array(count).fill(HALF);

// Characters as bytes: each holds seven bits, whatever stands above them.
function reader(text) {
  let [at, held, bits] = [0, 0, 0];
  return () => {
    while (bits < 8) {
      held = (held << 7) | (text.charCodeAt(at++) & 127);
      bits += 7;
    }
    bits -= 8;
    const byte = held >> bits;
    held &= (1 << bits) - 1;
    return byte;
  };
}

// The range decoder: single bits, numbers of some bits from the highest or the lowest on, and bits of no likelihood.
function decoder(byte) {
  let [range, code] = [0xffffffff, 0];
  for (let i = 0; i < 5; i++) code = ((code << 8) | byte()) >>> 0;
  const refill = () => {
    if (range >= 0x1000000) return;
    range = (range << 8) >>> 0;
    code = ((code << 8) | byte()) >>> 0;
  };
  const bit = (of, at) => {
    const bound = (range >>> 11) * of[at];
    const found = code < bound ? 0 : 1;
    if (found) {
      [range, code] = [range - bound, code - bound];
      of[at] -= of[at] >> 5;
    } else {
      range = bound;
      of[at] += (2048 - of[at]) >> 5;
    }
    refill();
    return found;
  };
  const tree = (of, bits, from = 0) => {
    let found = 1;
    while (found < 1 << bits) found = (found << 1) | bit(of, from + found);
    return found - (1 << bits);
  };
  const reversed = (of, bits, from = 0) => {
    let [found, sum] = [1, 0];
    for (let i = 0; i < bits; i++) {
      const one = bit(of, from + found);
      found = (found << 1) | one;
      sum |= one << i;
    }
    return sum;
  };
  const direct = (bits) => {
    let found = 0;
    for (let i = 0; i < bits; i++) {
      range >>>= 1;
      const one = code >= range ? 1 : 0;
      code -= one * range;
      found = (found << 1) | one;
      refill();
    }
    return found;
  };
  return { bit, tree, reversed, direct };
}

// The text that was packed, of `size` bytes.
export function unpacked(text, size) {
  const { bit, tree, reversed, direct } = decoder(reader(text));
  const [isMatch, isRepeat, isOther, isThird, isFourth, isLong] = Array.from({ length: 6 }, () => likelihoods(12));
  const [literals, slots, near, align] = [8 * 0x300, 4 * 64, 128, 16].map(likelihoods);
  const [ofMatch, ofRepeat] = [274, 274].map(likelihoods);
  const out = new Uint8Array(size);
  const back = [0, 0, 0, 0]; // the last four distances, less one
  let [at, state] = [0, 0];

  const length = (of) => {
    if (!bit(of, 0)) return tree(of, 3, 2);
    return bit(of, 1) ? 16 + tree(of, 8, 18) : 8 + tree(of, 3, 10);
  };
  const distance = (length) => {
    const slot = tree(slots, 6, 64 * Math.min(length, 3));
    if (slot < 4) return slot;
    const bits = (slot >> 1) - 1;
    const high = (2 | (slot & 1)) << bits;
    return high + (slot < 14 ? reversed(near, bits, high - slot) : direct(bits - 4) * 16 + reversed(align, 4));
  };
  const literal = () => {
    const from = 0x300 * ((out[at - 1] ?? 0) >> 5);
    let found = 1;
    for (let like = out[at - back[0] - 1], same = state >= 7; same && found < 0x100; like <<= 1) {
      const expected = (like >> 7) & 1;
      found = (found << 1) | bit(literals, from + ((1 + expected) << 8) + found);
      same = (found & 1) === expected;
    }
    while (found < 0x100) found = (found << 1) | bit(literals, from + found);
    state = state < 4 ? 0 : state - (state < 10 ? 3 : 6);
    return found;
  };
  // Which of the last distances comes again; none of them is -1.
  const again = () => {
    if (!bit(isRepeat, state)) return -1;
    if (!bit(isOther, state)) return 0;
    if (!bit(isThird, state)) return 1;
    return 2 + bit(isFourth, state);
  };

  while (at < size) {
    if (!bit(isMatch, state)) {
      out[at] = literal();
      at += 1;
      continue;
    }
    const [which, early] = [again(), state < 7];
    let left = 1;
    if (which === 0 && !bit(isLong, state)) {
      state = early ? 9 : 11;
    } else if (which < 0) {
      left = length(ofMatch);
      back.pop();
      back.unshift(distance(left));
      left += 2;
      state = early ? 7 : 10;
    } else {
      if (which) back.unshift(...back.splice(which, 1));
      left = 2 + length(ofRepeat);
      state = early ? 8 : 11;
    }
    for (; left > 0; left--, at++) out[at] = out[at - back[0] - 1];
  }
  return new TextDecoder().decode(out);
}
