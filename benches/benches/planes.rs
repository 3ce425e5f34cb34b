//! Splitting into planes, merging and differences, by dtype and vector instructions.

use std::hint::black_box;

use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, measurement::WallTime};
use s4_benches::{Planes, Sample};
use s4_planes::{FloatBits, Kernels, Simd, StepFactors, Width, token_bound};

type Group<'a> = BenchmarkGroup<'a, WallTime>;

/// The yardstick: what a split or a merge that did nothing would take.
fn copy(group: &mut Group<'_>, sample: &Sample) {
    let mut dst = vec![0; sample.data.len()];
    group.bench_function(BenchmarkId::new(sample.name, "copy"), |b| {
        b.iter(|| dst.copy_from_slice(black_box(&sample.data)));
    });
}

fn fields(group: &mut Group<'_>, sample: &Sample, kernels: Kernels) {
    let n = sample.data.len() / sample.width.bytes();
    let Planes { mut e, mut a, mut b } = Planes::new(n, sample.width);
    group.bench_function(id("split-fields", sample, kernels), |bencher| {
        bencher.iter(|| {
            let src = black_box(&sample.data);
            kernels.split_fields(sample.width, src, &mut e, &mut a, &mut b);
        });
    });
    let mut dst = vec![0; sample.data.len()];
    group.bench_function(id("merge-fields", sample, kernels), |bencher| {
        bencher.iter(|| kernels.merge_fields(sample.width, black_box(&e), &a, &b, &mut dst));
    });
}

/// The difference to the next training step, in place. Adding undoes the subtraction, so that every
/// iteration sees the same values.
fn differences(group: &mut Group<'_>, sample: &Sample, kernels: Kernels) {
    let mut buf = sample.next.clone();
    group.bench_function(id("sub-and-add-values", sample, kernels), |bencher| {
        bencher.iter(|| {
            kernels.sub_values(sample.width, &mut buf, black_box(&sample.data));
            kernels.add_values(sample.width, &mut buf, black_box(&sample.data));
        });
    });
}

fn tokens(group: &mut Group<'_>, sample: &Sample, kernels: Kernels) {
    let n = sample.data.len() / sample.width.bytes();
    let mut residuals = sample.next.clone();
    kernels.sub_values(sample.width, &mut residuals, &sample.data);
    let (mut tokens, mut bits) = (vec![0; n], vec![0; token_bound(sample.width, n)]);
    let len = kernels.split_token(sample.width, &residuals, &mut tokens, &mut bits);
    group.bench_function(id("split-token", sample, kernels), |bencher| {
        let src = black_box(&residuals);
        bencher.iter(|| kernels.split_token(sample.width, src, &mut tokens, &mut bits));
    });
    let (bits, mut dst) = (&bits[..len], vec![0; residuals.len()]);
    let merged = kernels.merge_token(sample.width, &tokens, bits, &mut dst);
    assert!(
        merged.is_ok() && dst == residuals,
        "tokens did not merge to what they were split from"
    );
    group.bench_function(id("merge-token", sample, kernels), |bencher| {
        bencher.iter(|| kernels.merge_token(sample.width, black_box(&tokens), bits, &mut dst));
    });
}

/// An optimizer's step, with weights for moments: its time depends on the values only if they are subnormal.
fn step(group: &mut Group<'_>, sample: &Sample, kernels: Kernels) {
    let bits = if sample.width == Width::B2 { FloatBits::BFloat16 } else { FloatBits::Float32 };
    let factors = StepFactors { keep: 0.99997, rate: 3e-4, epsilon: 1e-8 };
    let (first, mut second) = (&sample.next[..], sample.next.clone());
    // Second moments have no sign.
    second.chunks_exact_mut(sample.width.bytes()).for_each(|x| x[sample.width.bytes() - 1] &= 0x7f);
    let mut dst = vec![0; sample.data.len()];
    group.bench_function(id("optimizer-step", sample, kernels), |bencher| {
        bencher.iter(|| {
            let values = [black_box(&sample.data[..]), first, &second].map(|v| (bits, v));
            kernels.optimizer_step(factors, values, &mut dst);
        });
    });
}

fn id(kernel: &str, sample: &Sample, kernels: Kernels) -> BenchmarkId {
    BenchmarkId::new(format!("{}/{kernel}", sample.name), kernels.simd())
}

fn main() {
    let mut criterion: Criterion = s4_benches::criterion().configure_from_args();
    let mut group = criterion.benchmark_group("planes");
    for sample in &Sample::all() {
        group.throughput(Throughput::Bytes(sample.data.len() as u64));
        copy(&mut group, sample);
        for kernels in Simd::available().map(Kernels::new) {
            fields(&mut group, sample, kernels);
            differences(&mut group, sample, kernels);
            tokens(&mut group, sample, kernels);
            step(&mut group, sample, kernels);
        }
    }
    group.finish();
    criterion.final_summary();
}
