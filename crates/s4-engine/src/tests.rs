//! Tests of the engine as a whole that need the private parts of plans.

use s4_format::layout::Planes;
use s4_format::side::{Side, SideKind};
use s4_format::{ChunkRecord, ContextsId, DType, Digest, LayoutId, Plan, ResidualId, StreamEntry};
use s4_planes::patterns::{self, Kind};
use s4_planes::{Simd, Width};

use crate::{
    CpuEngine, DecodeJob, EncodeJob, EncodedChunk, InputValues, ParentSample, PlanJob, PlaneCoding,
    Preset, Scratch, TensorPlan, TensorSpec, TensorView, parent_probes,
};

/// A tensor's chunks, encoded.
struct Encoded {
    plan: TensorPlan,
    chunks: Vec<(EncodedChunk, Vec<u8>)>,
    side: Side,
}

fn encode(engine: &CpuEngine, view: &TensorView<'_>, plan: Option<TensorPlan>) -> Encoded {
    let mut scratch = Scratch::default();
    let plan = plan
        .unwrap_or_else(|| engine.plan(&PlanJob::new(Preset::Fast, view), &mut scratch).unwrap());
    let size = view.dtype.value_width() << plan.chunk_log2;
    let mut chunks = vec![];
    for chunk in 0..view.data.len().div_ceil(size) as u64 {
        // A frame is appended to whatever precedes it.
        let mut frame = vec![0xa5; 5];
        let e = engine
            .encode(&EncodeJob { view, plan: &plan, chunk, inputs: &[] }, &mut scratch, &mut frame)
            .unwrap();
        assert_eq!(frame.len(), 5 + e.len);
        chunks.push((e, frame.split_off(5)));
    }
    let shared = chunks.iter().any(|c| c.0.shared);
    let side = plan.side_data(shared).unwrap();
    let mut bytes = vec![];
    side.write(&mut bytes).unwrap();
    Encoded { plan, chunks, side: Side::parse(&bytes).unwrap() }
}

fn decode(
    engine: &CpuEngine,
    view: &TensorView<'_>,
    e: &Encoded,
    fill: u8,
) -> s4_format::Result<Vec<u8>> {
    let spec = TensorSpec {
        dtype: view.dtype,
        shape: view.shape,
        plan: &e.plan.plan,
        side: &e.side,
        chunk_log2: e.plan.chunk_log2,
    };
    let mut out = vec![fill; view.data.len()];
    let size = view.dtype.value_width() << e.plan.chunk_log2;
    let mut scratch = Scratch::default();
    for (i, (dst, (chunk, frame))) in out.chunks_mut(size).zip(&e.chunks).enumerate() {
        let record = record(chunk, frame);
        engine.decode(
            &DecodeJob { spec: &spec, chunk: i as u64, record: &record, frame, inputs: &[] },
            &mut scratch,
            dst,
        )?;
    }
    Ok(out)
}

fn record(e: &EncodedChunk, frame: &[u8]) -> ChunkRecord {
    ChunkRecord {
        offset: 0,
        object: 0,
        len: u32::try_from(frame.len()).unwrap(),
        plain: e.plain,
        crc_encoded: e.crc_encoded,
        crc_raw: e.crc_raw,
    }
}

fn kinds() -> Vec<(DType, Kind)> {
    let int = |w| Kind::int(w);
    vec![
        (DType::BFloat16, Kind::BF16),
        (DType::Float16, Kind::F16),
        (DType::Float32, Kind::F32),
        (DType::Float64, Kind::F64),
        (DType::Float8E4M3Fn, Kind::F8_E4M3),
        (DType::Float8E5M2, Kind::F8_E5M2),
        (DType::Int8, int(Width::B1)),
        (DType::Int16, int(Width::B2)),
        (DType::Int32, int(Width::B4)),
        (DType::Int64, int(Width::B8)),
    ]
}

#[test]
fn every_pattern_comes_back_and_every_simd_writes_the_same_bytes() {
    let engines: Vec<_> = Simd::available().map(CpuEngine::new).collect();
    for (dtype, kind) in kinds() {
        for n in [0, 1, 2, 255, 8191, 70_003] {
            let shape = [n as u64];
            for (name, data) in patterns::all(kind, n) {
                let view = TensorView { dtype, shape: &shape, data: &data };
                let first = encode(&engines[0], &view, None);
                let stored: usize = first.chunks.iter().map(|c| c.1.len()).sum();
                assert!(stored <= data.len(), "{dtype} {name} {n} grew to {stored}");
                for engine in &engines {
                    let e = encode(engine, &view, None);
                    for (a, b) in e.chunks.iter().zip(&first.chunks) {
                        assert!(a.1 == b.1, "{dtype} {name} {n}: {engine:?}");
                    }
                    assert!(
                        decode(engine, &view, &first, 0xff).unwrap() == data,
                        "{dtype} {name} {n}"
                    );
                }
            }
        }
    }
}

/// Values that are products of a row and a column factor, as second moments are.
fn rank1_values(rows: usize, cols: usize) -> Vec<u8> {
    let noise =
        patterns::all(Kind::int(Width::B4), rows * cols).find(|p| p.0 == "random").unwrap().1;
    let mut out = vec![];
    for (i, n) in noise.chunks_exact(4).enumerate() {
        let n = f32::from(u16::from_le_bytes([n[0], n[1]])) / 65536.0;
        let row = 2f32.powi((i / cols) as i32 % 17 - 30);
        let col = 1.5f32.powi((i % cols) as i32 % 11);
        out.extend((row * col * (1.0 + n / 4.0)).to_le_bytes());
    }
    out
}

#[test]
fn a_rank1_tensor_round_trips_and_is_smaller_than_planes() {
    let (rows, cols) = (300usize, 512usize);
    let data = rank1_values(rows, cols);
    let shape = [rows as u64, cols as u64];
    let view = TensorView { dtype: DType::Float32, shape: &shape, data: &data };
    let mut direct = 0;
    for simd in Simd::available() {
        let engine = CpuEngine::new(simd);
        direct = encode(&engine, &view, None).chunks.iter().map(|c| c.1.len()).sum();
    }
    let grid = s4_predict::rank1::Grid::of(&shape).unwrap();
    for layout in [LayoutId::WHOLE, LayoutId::BYTES, LayoutId::FIELDS, LayoutId::FIELDS_SIGN] {
        for simd in Simd::available() {
            let engine = CpuEngine::new(simd);
            let offsets = s4_predict::rank1::fit(Width::B4, &grid, &data).unwrap();
            let mut side = Side::default();
            side.push(SideKind::OFFSETS, offsets).unwrap();
            let planes = vec![PlaneCoding::RANS12; 4];
            let plan = TensorPlan { side, ..TensorPlan::new(Plan::rank1(layout), planes, 16) };
            plan.plan.require_open().unwrap();
            let e = encode(&engine, &view, Some(plan));
            assert_eq!(e.chunks.len(), 3);
            assert!(decode(&engine, &view, &e, 7).unwrap() == data);
            let size: usize = e.chunks.iter().map(|c| c.1.len()).sum();
            if layout == LayoutId::FIELDS_SIGN {
                assert!(size < direct - direct / 16, "{size} {direct}");
            }
        }
    }
}

/// A plan of differences from a parent with `view`'s shape.
fn delta_plan(residual: ResidualId, layout: LayoutId, width: usize) -> TensorPlan {
    let planes = Planes::new(layout, width, 0).unwrap().sizes().len();
    TensorPlan {
        plan: Plan { residual, ..Plan::delta(layout, Digest::of(b"parent"), 0) },
        planes: vec![PlaneCoding::RANS8; planes],
        chunk_log2: 16,
        side: Side::default(),
        one_table: 0,
        shared: vec![],
        choice: None,
    }
}

#[test]
fn differences_of_every_kind_and_layout_come_back_from_the_same_chunk_of_the_parent() {
    let mut contexts_seen = 0;
    for (dtype, kind) in kinds() {
        let (n, width) = (70_003, dtype.value_width());
        let all: Vec<_> = patterns::all(kind, n).collect();
        let mut layouts = vec![LayoutId::WHOLE, LayoutId::BYTES, LayoutId::TOKEN];
        if matches!(kind, Kind::BF16 | Kind::F16 | Kind::F32 | Kind::F64) {
            layouts.extend([LayoutId::FIELDS, LayoutId::FIELDS_SIGN]);
        }
        for (i, (name, data)) in all.iter().enumerate() {
            let parent = &all[(i + 1) % all.len()].1;
            let layout = layouts[i % layouts.len()];
            let token = layout == LayoutId::TOKEN;
            let residual = if token || i % 2 == 1 { ResidualId::SUB } else { ResidualId::XOR };
            let mut plan = delta_plan(residual, layout, width);
            let in_fields = matches!(layout, LayoutId::FIELDS | LayoutId::FIELDS_SIGN);
            if residual == ResidualId::SUB && in_fields {
                plan.plan.contexts = ContextsId::EXPONENT;
                let contexts = s4_predict::exponent::side_data(dtype, parent);
                plan.side.push(SideKind::CONTEXTS, contexts).unwrap();
                contexts_seen += 1;
            }
            plan.plan.require_open().unwrap();
            let view = TensorView { dtype, shape: &[n as u64], data };
            let size = width << 16;
            let mut first: Option<Vec<Vec<u8>>> = None;
            for simd in Simd::available() {
                let engine = CpuEngine::new(simd);
                let mut scratch = Scratch::default();
                let mut frames = vec![];
                for (chunk, (values, parent)) in
                    (0..).zip(data.chunks(size).zip(parent.chunks(size)))
                {
                    let mut frame = vec![];
                    let e = engine
                        .encode(
                            &EncodeJob { view: &view, plan: &plan, chunk, inputs: &[parent] },
                            &mut scratch,
                            &mut frame,
                        )
                        .unwrap();
                    let record = record(&e, &frame);
                    let side = plan.side_data(e.shared).unwrap();
                    let spec = TensorSpec {
                        dtype,
                        shape: view.shape,
                        plan: &plan.plan,
                        side: &side,
                        chunk_log2: 16,
                    };
                    let mut decode = |parent: &[u8]| {
                        let mut out = parent.to_vec();
                        engine
                            .decode(
                                &DecodeJob {
                                    spec: &spec,
                                    chunk,
                                    record: &record,
                                    frame: &frame,
                                    inputs: &[InputValues::Destination],
                                },
                                &mut scratch,
                                &mut out,
                            )
                            .map(|()| out)
                    };
                    assert!(decode(parent).unwrap() == values, "{dtype} {name} {layout}");
                    // Without the parent, or with a different one, decoding is an error: never other values.
                    if !record.plain {
                        assert!(decode(&parent[1..]).is_err());
                        let mut other = parent.to_vec();
                        other[0] ^= 1;
                        assert!(decode(&other).is_err());
                        let alone = engine.decode(
                            &DecodeJob {
                                spec: &spec,
                                chunk,
                                record: &record,
                                frame: &frame,
                                inputs: &[],
                            },
                            &mut scratch,
                            &mut other,
                        );
                        assert!(alone.is_err());
                    }
                    frames.push(frame);
                }
                assert!(*first.get_or_insert_with(|| frames.clone()) == frames, "{simd}");
            }
        }
    }
    assert!(contexts_seen > 4, "{contexts_seen}");
}

#[test]
fn a_difference_is_planned_where_it_is_smaller_and_nowhere_else() {
    let n = 400_000u64;
    let engine = CpuEngine::new(Simd::detect());
    let mut scratch = Scratch::default();
    let weights = patterns::all(Kind::BF16, n as usize).find(|p| p.0 == "like-weights").unwrap().1;
    let noise = patterns::all(Kind::BF16, n as usize).find(|p| p.0 == "random").unwrap().1;
    let view = TensorView { dtype: DType::BFloat16, shape: &[n], data: &weights };
    let probes = parent_probes(DType::BFloat16, n);
    let mut plan = |parent: &[u8]| {
        let run = |r: &std::ops::Range<u64>| &parent[r.start as usize * 2..r.end as usize * 2];
        let values = probes.iter().flat_map(run).copied().collect::<Vec<u8>>();
        let sample = ParentSample {
            manifest: Digest::of(b"p"),
            tensor: 3,
            values: &values,
            moments: &[],
            expected: None,
        };
        engine
            .plan(
                &PlanJob { parent: Some(&sample), ..PlanJob::new(Preset::Fast, &view) },
                &mut scratch,
            )
            .unwrap()
    };
    let mut near = weights.clone();
    near.iter_mut().step_by(14).for_each(|b| *b ^= 3);
    assert_eq!(plan(&near).plan.parent(), Some((Digest::of(b"p"), 3)));
    assert_eq!(plan(&weights).plan.parent(), Some((Digest::of(b"p"), 3)));
    for far in [&noise, &vec![0; weights.len()]] {
        let direct =
            engine.plan(&PlanJob::new(Preset::Fast, &view), &mut Scratch::default()).unwrap();
        let planned = plan(far);
        assert_eq!((&planned.plan, &planned.planes), (&direct.plan, &direct.planes));
    }
    let short = ParentSample {
        manifest: Digest::of(b"p"),
        tensor: 3,
        values: &[0; 10],
        moments: &[],
        expected: None,
    };
    assert!(
        engine
            .plan(
                &PlanJob { parent: Some(&short), ..PlanJob::new(Preset::Fast, &view) },
                &mut Scratch::default()
            )
            .is_err()
    );
}

#[test]
fn the_planner_looks_into_few_chunks_of_a_parent() {
    for dtype in [DType::Int8, DType::BFloat16, DType::Float32, DType::Complex128] {
        let chunk = 1u64 << crate::chunk_log2(dtype);
        assert!(parent_probes(dtype, 0).is_empty());
        let some = [1, 16_384, 16_385, 40_000, chunk, 4 * chunk + 1, 5 * chunk - 1];
        for values in some.into_iter().chain([24 * chunk - 1, 24 * chunk, 1 << 32]) {
            let probes = parent_probes(dtype, values);
            let sum: u64 = probes.iter().map(|p| p.end - p.start).sum();
            let part = (values / 64).min(1024) * 16;
            assert_eq!(sum, if values <= 16_384 { values } else { part });
            assert!(probes.windows(2).all(|w| w[0].end <= w[1].start));
            assert!(probes.iter().all(|p| p.start < p.end && p.end <= values));
            let mut chunks: Vec<_> =
                probes.iter().flat_map(|p| [p.start / chunk, (p.end - 1) / chunk]).collect();
            chunks.dedup();
            // At most a third of a large tensor's chunks.
            let most = if values < 24 * chunk { 5 } else { 8 };
            assert!(chunks.len() <= most, "{values} values of {dtype}: {chunks:?}");
        }
    }
}

#[test]
fn a_short_last_chunk_shares_the_tensors_table() {
    let n = (1 << 17) + 5000;
    let data = patterns::all(Kind::BF16, n).find(|p| p.0 == "like-weights").unwrap().1;
    let shape = [n as u64];
    let view = TensorView { dtype: DType::BFloat16, shape: &shape, data: &data };
    let engine = CpuEngine::new(Simd::detect());
    let e = encode(&engine, &view, None);
    assert!(e.chunks.iter().any(|c| c.0.shared), "no chunk uses the shared table");
    assert!(!e.side.get(SideKind::TABLES).is_empty());
    assert!(decode(&engine, &view, &e, 0).unwrap() == data);
    // Without its side data the tensor is refused, not decoded to something else.
    let bare = Encoded { side: Side::default(), ..e };
    assert!(decode(&engine, &view, &bare, 0).is_err());
}

#[test]
fn damaged_frames_are_found_by_their_checksum() {
    let data = patterns::all(Kind::F32, 3000).find(|p| p.0 == "like-weights").unwrap().1;
    let view = TensorView { dtype: DType::Float32, shape: &[3000], data: &data };
    let engine = CpuEngine::new(Simd::detect());
    let mut e = encode(&engine, &view, None);
    for byte in 0..e.chunks[0].1.len() {
        e.chunks[0].1[byte] ^= 1 << (byte % 8);
        let error = decode(&engine, &view, &e, 0).unwrap_err();
        assert_eq!(error.location().chunk, Some(0), "{error}");
        e.chunks[0].1[byte] ^= 1 << (byte % 8);
    }
}

#[test]
fn frames_damaged_by_someone_who_mends_checksums_do_no_harm() {
    for (dtype, kind) in [
        (DType::Float32, Kind::F32),
        (DType::BFloat16, Kind::BF16),
        (DType::Int32, Kind::int(Width::B4)),
    ] {
        for pattern in ["like-weights", "like-squares", "sparse", "counting"] {
            let Some((_, data)) = patterns::all(kind, 700).find(|p| p.0 == pattern) else {
                continue;
            };
            let view = TensorView { dtype, shape: &[700], data: &data };
            for simd in Simd::available() {
                let engine = CpuEngine::new(simd);
                let clean = encode(&engine, &view, None);
                let frame = &clean.chunks[0].1;
                for at in 0..frame.len() * 8 {
                    let mut frame = frame.clone();
                    frame[at / 8] ^= 1 << (at % 8);
                    mended(&engine, &view, &clean, frame);
                }
                for len in 0..frame.len() {
                    mended(&engine, &view, &clean, frame[..len].to_vec());
                }
            }
        }
    }
}

/// Decodes a damaged frame with a matching checksum: the result is the data or an error, never other data.
fn mended(engine: &CpuEngine, view: &TensorView<'_>, clean: &Encoded, frame: Vec<u8>) {
    let mut chunk = clean.chunks[0].0;
    let planes = Planes::new(clean.plan.plan.layout, view.dtype.value_width(), 0).unwrap();
    let streams = StreamEntry::parse_chunk(&frame, planes.sizes().len());
    chunk.crc_encoded = streams.map_or(chunk.crc_encoded, |streams| streams.crc());
    let e = Encoded {
        plan: clean.plan.clone(),
        side: clean.side.clone(),
        chunks: vec![(chunk, frame)],
    };
    if let Ok(out) = decode(engine, view, &e, 0) {
        assert!(out == view.data);
    }
}
