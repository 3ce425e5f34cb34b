//! Shares of magnitudes, against their definition, with every set of instructions.

use s4_planes::patterns::{self, Kind};
use s4_planes::{Kernels, Simd, Width};

#[test]
fn shares_are_exact_and_sums_wrap_below_the_sign() {
    for width in [Width::B1, Width::B2, Width::B4, Width::B8] {
        let bytes = width.bytes();
        let most = u64::MAX >> (65 - width.bits());
        let word = |b: &[u8]| b.iter().rev().fold(0u64, |all, b| all << 8 | u64::from(*b));
        for (name, values) in patterns::all(Kind::int(width), 333) {
            let mut before = values.clone();
            before.rotate_left(7 * bytes);
            for share in [0, 1, 77, 128, 254, 255] {
                let each = before.chunks(bytes).zip(values.chunks(bytes)).map(|(x, y)| {
                    let part = u128::from(word(y) & most) * u128::from(share) / 256;
                    (word(x).wrapping_add(part as u64) & most).to_le_bytes()
                });
                let expected: Vec<u8> = each.flat_map(|x| x[..bytes].to_vec()).collect();
                for simd in Simd::available() {
                    let mut out = before.clone();
                    Kernels::new(simd).add_shares(width, share, &mut out, &values);
                    assert!(out == expected, "{width:?} {name} {share} {simd}");
                }
            }
        }
    }
}
