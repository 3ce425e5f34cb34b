//! Copies, rounded or not, wherever they and their originals are.

use std::sync::Mutex;

use s4weights::{Progress, Slice};

use super::*;

fn rounded(data: &[u8], to: impl Fn(u32) -> u16) -> Vec<u8> {
    let values = data.as_chunks::<4>().0.iter();
    values.flat_map(|x| to(u32::from_le_bytes(*x)).to_le_bytes()).collect()
}

fn to_bf16(x: u32) -> u16 {
    ((x + 0x7fff + (x >> 16 & 1)) >> 16) as u16
}

/// A model's weights, their masters, a moment and an average; also weights in fp16, whose masters
/// have another shape.
fn state(step: u8) -> Vec<Tensor> {
    let n = 150_016;
    let mut master = patterns::all(Kind::F32, n).find(|p| p.0 == "like-weights").unwrap().1;
    master.chunks_exact_mut(4).step_by(3).for_each(|x| x[1] = x[1].wrapping_add(step));
    let model = rounded(&master, to_bf16);
    let moment = patterns::all(Kind::F32, n).find(|p| p.0 == "like-squares").unwrap().1;
    let half = rounded(&master[..4 * 80_000], |x| {
        let mut out = [0; 2];
        s4_planes::Kernels::default().to_fp16(&x.to_le_bytes(), &mut out);
        u16::from_le_bytes(out)
    });
    let tensor = |name: &str, dtype, shape: &[u64], data| Tensor {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        data,
    };
    vec![
        tensor("model.w", DType::BFloat16, &[293, 512], model),
        tensor("model.h", DType::Float16, &[80_000], half),
        tensor("optimizer.fp32.w", DType::Float32, &[n as u64], master.clone()),
        tensor("optimizer.fp32.h", DType::Float32, &[800, 100], master[..4 * 80_000].to_vec()),
        tensor("optimizer.v", DType::Float32, &[293, 512], moment),
        tensor("average.w", DType::Float32, &[293, 512], master),
    ]
}

fn write(path: &Path, sources: &[TensorSource<'_>], options: WriteOptions) -> s4weights::Report {
    let mut writer = Writer::create(path.into(), options).unwrap();
    writer.write(sources).unwrap();
    writer.finish(Default::default()).unwrap()
}

/// Sources on the device where a bit of `places` is set, else on the host.
pub(super) fn mixed<'a>(
    tensors: &'a [Tensor],
    buffers: &[DeviceBuffer],
    places: usize,
) -> Vec<TensorSource<'a>> {
    let place = |i: usize| match places >> i & 1 {
        0 => Values::Host(&tensors[i].data),
        _ => Values::Device(memory(&buffers[i])),
    };
    let all = tensors.iter().enumerate();
    all.map(|(i, t)| TensorSource::new(&t.name, t.dtype, &t.shape, place(i))).collect()
}

pub(super) fn read_on(gpu: &Gpu, reader: &Reader, tensors: &[Tensor]) -> Vec<Vec<u8>> {
    let to: Vec<_> = tensors.iter().map(|t| gpu.upload(&vec![0xee; t.data.len()])).collect();
    let requests: Vec<_> = to.iter().map(memory).enumerate().rev().collect();
    reader.read_into_device(&gpu.engine, &requests).unwrap();
    to.iter().map(|b| gpu.download(b)).collect()
}

pub(super) fn plans(reader: &Reader) -> Vec<String> {
    reader.inspect(false).unwrap().tensors.into_iter().map(|t| t.plan).collect()
}

#[test]
fn copies_are_found_and_stored_alike_wherever_tensors_are() {
    let Some(gpu) = gpu() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (host, there) = (dir.path().join("host.s4w"), dir.path().join("there.s4w"));
    let (tensors, later) = (state(0), state(1));
    let buffers: Vec<_> = tensors.iter().map(|t| gpu.upload(&t.data)).collect();
    let later_there: Vec<_> = later.iter().map(|t| gpu.upload(&t.data)).collect();
    write(&host, &mixed(&tensors, &buffers, 0), WriteOptions::default());
    let reader = Reader::open(host.as_path().into(), Default::default()).unwrap();
    assert!(plans(&reader)[..2].iter().all(|p| p == "cast xor fields"), "{:?}", plans(&reader));
    assert_eq!(plans(&reader)[5], "same xor fields");
    let reader = Arc::new(reader);
    let delta = |engine: bool| {
        let options =
            WriteOptions { parent: Some(Arc::clone(&reader) as _), ..WriteOptions::default() };
        if engine { gpu.with(options) } else { options }
    };
    let child = dir.path().join("child.s4w");
    write(&child, &mixed(&later, &later_there, 0), delta(false));
    // Copies and originals in the same place or in different ones, both ways round.
    for places in [0b000101, 0b101010, 0b100001, 0b001100, 0b010011, 0b111111] {
        write(&there, &mixed(&tensors, &buffers, places), gpu.with(WriteOptions::default()));
        let same = std::fs::read(&host).unwrap() == std::fs::read(&there).unwrap();
        assert!(same, "{places:06b}");
        if places.is_multiple_of(5) || places == 0b111111 {
            write(&there, &mixed(&later, &later_there, places), delta(true));
            let same = std::fs::read(&child).unwrap() == std::fs::read(&there).unwrap();
            assert!(same, "{places:06b}, of a parent");
        }
    }
    let chunks = gpu.engine.chunks();
    assert!(chunks.device > 0 && chunks.refused + chunks.host == 0, "{chunks:?}");
    let child = Reader::open(child.as_path().into(), Default::default()).unwrap();
    child.set_parent(Arc::clone(&reader)).unwrap();
    assert_eq!((&*plans(&child)[0], &*plans(&child)[5]), ("cast xor fields", "same xor fields"));
    for (t, back) in later.iter().zip(read_on(&gpu, &child, &later)) {
        assert!(back == t.data, "{}: of a parent, to the device", t.name);
        assert!(child.read(&t.name).unwrap() == t.data, "{}: of a parent", t.name);
    }
}

#[test]
fn copies_come_back_on_the_device_with_what_they_are_copies_of_and_without() {
    let Some(gpu) = gpu() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.s4w");
    let tensors = state(0);
    write(&path, &mixed(&tensors, &[], 0), WriteOptions::default());
    let reader = Reader::open(path.as_path().into(), Default::default()).unwrap();
    let to: Vec<_> = tensors.iter().map(|t| gpu.upload(&vec![0xee; t.data.len()])).collect();
    let clear = |i: usize| gpu.upload(&vec![0xee; tensors[i].data.len()]);
    for wanted in [&[0, 1, 2, 3, 4, 5][..], &[5, 4, 3, 2, 1, 0], &[0], &[1, 2], &[5, 2, 0], &[5]] {
        let before = gpu.engine.chunks();
        let to: Vec<_> = wanted.iter().map(|&i| clear(i)).collect();
        let requests: Vec<_> = wanted.iter().copied().zip(to.iter().map(memory)).collect();
        reader.read_into_device(&gpu.engine, &requests).unwrap();
        for (&i, buffer) in wanted.iter().zip(&to) {
            assert!(gpu.download(buffer) == tensors[i].data, "{wanted:?}: {}", tensors[i].name);
        }
        let chunks = gpu.engine.chunks();
        assert_eq!((chunks.refused, chunks.host), (before.refused, before.host), "{wanted:?}");
    }
    // A second time to the same buffers, and a part of one to the host.
    let requests = [(0, memory(&to[0])), (2, memory(&to[2])), (0, memory(&clear(0)))];
    reader.read_into_device(&gpu.engine, &requests[..2]).unwrap();
    assert!(gpu.download(&to[0]) == tensors[0].data);
    let part = reader.read_slice("model.w", &Slice(vec![290..293, 0..512])).unwrap();
    assert!(part == tensors[0].data[2 * 290 * 512..]);
}

#[test]
fn values_on_devices_are_needed_until_their_copies_are_encoded() {
    let Some(gpu) = gpu() else { return };
    let tensors = state(0);
    let buffers: Vec<_> = tensors.iter().map(|t| gpu.upload(&t.data)).collect();
    let total = tensors.iter().map(|t| t.data.len() as u64).sum::<u64>();
    // The masters on the device and copies on the host, which are written last; the average is on
    // the host, and last of all.
    let average = tensors[5].data.len() as u64;
    let cases = [(0b001100, total), (0b000011, total - average), (0b011111, total)];
    for (places, expected) in cases {
        let (done, told) = (Arc::new(Mutex::new(0)), Arc::new(Mutex::new(vec![])));
        let (watched, seen) = (Arc::clone(&done), Arc::clone(&done));
        let list = Arc::clone(&told);
        let options = WriteOptions {
            progress: Some(Arc::new(move |p: Progress| {
                *watched.lock().unwrap() = p.done;
                true
            })),
            staged: Some(Arc::new(move || list.lock().unwrap().push(*seen.lock().unwrap()))),
            ..gpu.with(WriteOptions::default())
        };
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("x.s4w"), &mixed(&tensors, &buffers, places), options);
        assert_eq!(*told.lock().unwrap(), [expected], "{places:06b}");
    }
}
