//! Valid inputs for the parsers of data sets beyond text.

use lockstep_data::samples::write_record;

/// Returns image files of every format, made by Pillow.
pub fn images() -> Vec<Vec<u8>> {
    macro_rules! files {
        ($($name:literal),*) => {
            vec![$(include_bytes!(concat!("../../../tests/fixtures/images/", $name)).to_vec()),*]
        };
    }
    files![
        "original.png",
        "palette.png",
        "baseline.jpg",
        "progressive.jpg",
        "restarts.jpg",
        "plain.bmp",
        "gray.pgm",
        "deflated.tif",
        "lossless.webp"
    ]
}

/// Returns idx files: images, labels, floats.
pub fn idx_files() -> Vec<Vec<u8>> {
    vec![
        [&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3][..], &[9; 12]].concat(),
        vec![0, 0, 8, 1, 0, 0, 0, 4, 1, 2, 3, 4],
        vec![0, 0, 0x0D, 1, 0, 0, 0, 1, 0x3F, 0x80, 0, 0],
    ]
}

/// Returns `.npy` files of versions 1 and 2.
pub fn npy_files() -> Vec<Vec<u8>> {
    let header =
        |text: &str| [&b"\x93NUMPY\x01\0"[..], &(text.len() as u16).to_le_bytes(), text.as_bytes()].concat();
    let long = "{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }\n";
    let second =
        [&b"\x93NUMPY\x02\0"[..], &(long.len() as u32).to_le_bytes(), long.as_bytes(), &[0; 16]].concat();
    let first = header("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n");
    let bytes = header("{'descr': '|u1', 'fortran_order': False, 'shape': (), }\n");
    vec![[first, vec![1; 24]].concat(), [bytes, vec![5]].concat(), second]
}

/// Returns examples with each kind of list, packed and not.
pub fn examples() -> Vec<Vec<u8>> {
    let field = |number: u8, bytes: &[u8]| [&[number << 3 | 2, bytes.len() as u8][..], bytes].concat();
    let entry = |name: &str, kind: u8, list: &[u8]| {
        field(1, &[field(1, name.as_bytes()), field(2, &field(kind, list))].concat())
    };
    let label = entry("label", 3, &[1 << 3, 7]);
    let name = entry("name", 1, &field(1, b"text"));
    let packed =
        [entry("label", 3, &field(1, &[3])), name.clone(), entry("x", 2, &field(1, &[0; 8]))].concat();
    vec![field(1, &[label, name].concat()), field(1, &packed)]
}

/// Returns TFRecord files of examples.
pub fn records() -> Vec<Vec<u8>> {
    let mut both = Vec::new();
    examples().iter().for_each(|example| write_record(example, &mut both));
    let mut one = Vec::new();
    write_record(&examples()[0], &mut one);
    vec![both, one]
}

/// Returns files of CIFAR-10 with one and two records.
pub fn cifar_files() -> Vec<Vec<u8>> {
    let record = |label: u8| [vec![label], vec![label; 3072]].concat();
    vec![record(0), [record(9), record(5)].concat()]
}

/// Returns tar files: plain members with metadata and a directory, long names of GNU, and names of pax.
pub fn tar_files() -> Vec<Vec<u8>> {
    let member = |name: &str, kind: u8, contents: &[u8]| {
        let mut block = vec![0; 512];
        block[..name.len()].copy_from_slice(name.as_bytes());
        block[100..107].copy_from_slice(b"0000444");
        block[124..135].copy_from_slice(format!("{:011o}", contents.len()).as_bytes());
        block[148..156].fill(b' ');
        block[156] = kind;
        block[257..265].copy_from_slice(b"ustar  \0");
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block.extend(contents);
        block.resize(block.len().next_multiple_of(512), 0);
        block
    };
    let end = vec![0; 1024];
    let samples = [
        member("__index__", b'0', b"{}"),
        member("a/0.cls", b'0', b"7"),
        member("a/0.txt", b'0', b"text"),
        member("a", b'5', b""),
        member("b.cls", b'0', b"19"),
        member("b.json", b'0', b"{\"a\": 1}"),
    ];
    let name = format!("{}/1", "x".repeat(120));
    let long = [
        member("././@LongLink", b'L', format!("{name}.txt\0").as_bytes()),
        member("short", b'0', b"long"),
        member("././@LongLink", b'L', format!("{name}.cls\0").as_bytes()),
        member("short", b'0', b"3"),
    ];
    let pax =
        [member("x", b'x', b"16 path=c/2.txt\n"), member("y", b'0', b"pax"), member("c/2.cls", b'0', b"1")];
    [samples.concat(), long.concat(), pax.concat()].map(|members| [members, end.clone()].concat()).to_vec()
}
