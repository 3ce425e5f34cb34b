//! Steps of optimizers, against what is defined, computed value by value in double precision: that has so many bits
//! that rounding its results of `+`, `-`, `*`, `/` and root gives those of single precision.

use s4_planes::{FloatBits, Kernels, Simd, StepFactors, Width};

const ALL: [FloatBits; 3] = [FloatBits::BFloat16, FloatBits::Float16, FloatBits::Float32];

/// 2^-125.
const SMALLEST: f64 = f64::from_bits((1023 - 125) << 52);

/// Floats of all sizes and like those of a training run, and every fourth a special value.
fn values(bits: FloatBits, n: usize, seed: u64) -> Vec<u8> {
    let mut x = seed + 1;
    let mut next = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 32) as u32
    };
    let special =
        [0u32, 1, 0x7f80_0000, 0x7f81_2345, 0xff80_0000, 0x8000_0000, 0x80_0000, 0xff_ffff];
    let special = special.into_iter().chain([0x100_0000, 0x7fff_ffff, 0x7f7f_ffff, 0x3880_0000]);
    let special: Vec<_> = special.chain([0x0400_0000, 0x7c00_0000, 0x1d00_0000]).collect();
    let mut out = vec![];
    for i in 0..n {
        let any = next();
        let x = match i % 4 {
            0 => special[next() as usize % special.len()],
            1 => any,
            // Around 2^-8, of both signs.
            _ => any & 0x8fff_ffff | 0x3000_0000,
        };
        match bits.width() {
            Width::B4 => out.extend(x.to_le_bytes()),
            _ => out.extend(((x >> 16) as u16).to_le_bytes()),
        }
    }
    out
}

/// A value by its definition in IEEE 754.
fn value(bits: FloatBits, values: &[u8], i: usize) -> f64 {
    let half = |i: usize| u16::from_le_bytes([values[2 * i], values[2 * i + 1]]);
    match bits {
        FloatBits::Float32 => {
            let (all, _) = values.as_chunks::<4>();
            f32::from_le_bytes(all[i]).into()
        }
        FloatBits::BFloat16 => f32::from_bits(u32::from(half(i)) << 16).into(),
        FloatBits::Float16 => {
            let x = half(i);
            let (exponent, mantissa) = (i32::from(x >> 10 & 31), f64::from(x & 0x3ff));
            let size = match exponent {
                31 if mantissa == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                0 => mantissa * 2f64.powi(-24),
                e => (1024.0 + mantissa) * 2f64.powi(e - 25),
            };
            if x >> 15 == 1 { -size } else { size }
        }
    }
}

fn flushed(x: f64) -> f64 {
    if x.abs() < SMALLEST { 0.0 } else { x }
}

/// Rounded to single precision, and zero if it is too small.
fn single(x: f64) -> f64 {
    flushed(f64::from(x as f32))
}

/// The value after a step; `None`: the weight.
fn stepped(factors: StepFactors, [w, m, v]: [f64; 3]) -> Option<f32> {
    let [keep, rate, epsilon] = [factors.keep, factors.rate, factors.epsilon].map(f64::from);
    let root = f64::from(flushed(v).sqrt() as f32);
    let quotient = single(flushed(m) / f64::from((root + epsilon) as f32));
    let after = single(single(flushed(w) * keep) - single(quotient * rate));
    after.is_finite().then_some(after as f32)
}

fn factors() -> [StepFactors; 5] {
    [
        StepFactors { keep: 0.999_968_6, rate: 3.139_661_6e-4, epsilon: 1e-8 },
        StepFactors { keep: 1.0, rate: 1.0, epsilon: 0.0 },
        StepFactors { keep: 0.0, rate: -1.0, epsilon: 1e-30 },
        StepFactors { keep: 1.0, rate: 0.0, epsilon: 1e-8 },
        StepFactors { keep: f32::MAX, rate: f32::from_bits(0x0100_0000), epsilon: f32::MAX },
    ]
}

fn check(simd: Simd) {
    let n = 2 * 512 + 77;
    for (k, bits) in (0..27).map(|i| (i, [ALL[i % 3], ALL[i / 3 % 3], ALL[i / 9]])) {
        let each: Vec<_> = (0..3).map(|i| values(bits[i], n, (3 * k + i) as u64)).collect();
        let given = [0, 1, 2].map(|j| (bits[j], &each[j][..]));
        let kernels = Kernels::new(simd);
        for factors in factors() {
            assert!(factors.are_valid());
            let width = bits[0].width().bytes();
            let mut out = vec![99; n * width];
            kernels.optimizer_step(factors, given, &mut out);
            let mut wide = vec![];
            for i in 0..n {
                let all = [0, 1, 2].map(|j| value(bits[j], &each[j], i));
                match (stepped(factors, all), bits[0]) {
                    (Some(x), _) => wide.extend(x.to_le_bytes()),
                    (None, FloatBits::Float32) => wide.extend(&each[0][4 * i..4 * i + 4]),
                    (None, FloatBits::BFloat16) => {
                        wide.extend([0, 0]);
                        wide.extend(&each[0][2 * i..2 * i + 2]);
                    }
                    (None, FloatBits::Float16) => wide.extend((all[0] as f32).to_le_bytes()),
                }
            }
            let mut expected = vec![0; n * width];
            match bits[0] {
                FloatBits::Float32 => expected.copy_from_slice(&wide),
                FloatBits::BFloat16 => kernels.to_bf16(&wide, &mut expected),
                FloatBits::Float16 => kernels.to_fp16(&wide, &mut expected),
            }
            assert!(out == expected, "{bits:?} {factors:?} {simd}");
        }
    }
}

#[test]
fn without_second_moments_they_are_zeros() {
    let n = 2 * 512 + 77;
    for simd in Simd::available() {
        for (k, bits) in (0..9).map(|i| (i, [ALL[i % 3], ALL[i / 3]])) {
            let each = [0, 1].map(|i| values(bits[i], n, (50 + 2 * k + i) as u64));
            let zeros = vec![0; 4 * n];
            for factors in factors() {
                let step = |second| {
                    let mut out = vec![99; n * bits[0].width().bytes()];
                    let moments = [(bits[1], &each[1][..]), (FloatBits::Float32, second)];
                    let given = [(bits[0], &each[0][..]), moments[0], moments[1]];
                    Kernels::new(simd).optimizer_step(factors, given, &mut out);
                    out
                };
                assert!(step(&[]) == step(&zeros), "{bits:?} {factors:?} {simd}");
            }
        }
    }
}

#[test]
fn steps_are_what_is_defined_for_every_mix_of_dtypes() {
    Simd::available().for_each(check);
}

/// As `torch.set_flush_denormal(True)` has it, and as libraries compiled for speed leave it.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_process_that_flushes_small_numbers_computes_the_same_steps() {
    let all = [ALL[0], ALL[2], ALL[2]];
    let n = 4096;
    let each: Vec<_> = (0..3).map(|i| values(all[i], n, 70 + i as u64)).collect();
    let given = [0, 1, 2].map(|j| (all[j], &each[j][..]));
    let steps = || {
        let mut out = vec![];
        for simd in Simd::available() {
            for factors in factors() {
                let mut to = vec![0; 2 * n];
                Kernels::new(simd).optimizer_step(factors, given, &mut to);
                out.push(to);
            }
        }
        out
    };
    let expected = steps();
    let flushing = || {
        let mut before = 0u32;
        // SAFETY: sets the control register of this thread, and what it was at the end.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut before) };
        // Results and operands below 2^-126 become zeros.
        let set = before | 1 << 15 | 1 << 6;
        // SAFETY: as above.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const set) };
        let tiny = std::hint::black_box(f32::from_bits(1)) * std::hint::black_box(1.0);
        let found = steps();
        // SAFETY: as above.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const before) };
        (tiny, found)
    };
    let (tiny, found) = std::thread::scope(|s| s.spawn(flushing).join().unwrap());
    assert!(tiny == 0.0, "the processor does not flush small numbers");
    assert!(found == expected);
}

#[test]
fn floats_are_widened_exactly() {
    let n = 600;
    for bits in ALL {
        let given = values(bits, n, 5);
        for simd in Simd::available() {
            let mut floats = vec![7.0; n];
            Kernels::new(simd).to_floats(bits, &given, &mut floats);
            for (i, found) in floats.into_iter().enumerate() {
                let expected = value(bits, &given, i);
                let same = expected == f64::from(found) || (expected.is_nan() && found.is_nan());
                assert!(same, "{i}: {expected} {found}");
            }
        }
    }
}

#[test]
fn constants_that_could_differ_are_not_valid() {
    let good = factors()[0];
    let tiny = f32::from_bits(0x00ff_ffff);
    for bad in [tiny, -tiny, f32::NAN, f32::INFINITY, f32::from_bits(1)] {
        assert!(!StepFactors { keep: bad, ..good }.are_valid());
        assert!(!StepFactors { rate: bad, ..good }.are_valid());
        assert!(!StepFactors { epsilon: bad, ..good }.are_valid());
    }
    assert!(!StepFactors { epsilon: -0.5, ..good }.are_valid());
    assert!(StepFactors { keep: -0.5, rate: -0.0, epsilon: 0.0 }.are_valid());
}
