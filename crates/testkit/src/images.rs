//! Images for tests, made by `qemu-img` and `qemu-io`, and their comparison byte by byte.
//!
//! Promises: equal seeds give equal bytes. A program that fails ends the test with what it printed.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::mount::text;
use crate::process::{command, ok, ok_words};

/// Bytes that repeat nowhere nearby and depend on a seed: a mix of the seed and the position
/// (`SplitMix64`).
#[must_use]
pub fn pattern(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    let first = offset / 8;
    let skip = usize::try_from(offset % 8).expect("below 8");
    // By words: tests make megabytes of it, also on emulated machines.
    let mut out = vec![0; (len + skip).next_multiple_of(8)];
    for (word, at) in out.chunks_exact_mut(8).zip(first..) {
        word.copy_from_slice(&mix(seed, at).to_le_bytes());
    }
    out.drain(..skip);
    out.truncate(len);
    out
}

fn mix(seed: u64, at: u64) -> u64 {
    let mut z = seed
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(at)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The first place at which two buffers differ: megabytes are compared as a whole before they are
/// by bytes.
#[must_use]
pub fn differs_at(a: &[u8], b: &[u8]) -> Option<usize> {
    if a == b {
        return None;
    }
    a.iter().zip(b).position(|(a, b)| a != b)
}

/// A raw file full of [`pattern`].
pub fn raw(path: &Path, len: u64, seed: u64) {
    const STEP: u64 = 1 << 20;
    let mut file = File::create(path).expect("a new file");
    for offset in (0..len).step_by(1 << 20) {
        let piece = usize::try_from(STEP.min(len - offset)).expect("1 MiB");
        file.write_all(&pattern(seed, offset, piece)).expect("room for an image");
    }
}

/// A raw file that is one hole.
pub fn sparse(path: &Path, len: u64) {
    File::create(path).and_then(|f| f.set_len(len)).expect("a sparse file");
}

/// Runs `qemu-img WORDS`, which must succeed.
pub fn qemu_img(words: &[&str]) -> String {
    ok(command(&["qemu-img"]).args(words))
}

/// Runs commands of `qemu-io` on an image: `qemu_io(path, "qcow2", &["write -P 7 0 64k", "discard
/// 1M 64k"])`.
pub fn qemu_io(path: &Path, format: &str, commands: &[&str]) {
    let mut words = command(&["qemu-io", "-f", format]);
    for each in commands {
        words.args(["-c", each]);
    }
    let out = ok(words.arg(path));
    assert!(!out.contains("failed"), "qemu-io {commands:?}: {out}");
}

/// A new qcow2 of `size` (as qemu-img writes sizes) with options such as
/// `cluster_size=512,compat=0.10`.
pub fn qcow2(path: &Path, size: &str, options: &str) {
    let mut words = vec!["create", "-q", "-f", "qcow2"];
    words.extend(if options.is_empty() { vec![] } else { vec!["-o", options] });
    words.extend([text(path), size]);
    qemu_img(&words);
}

/// What QEMU thinks the guest sees: `qemu-img convert` to raw, beside the image.
#[must_use]
pub fn reference(image: &Path, format: &str) -> PathBuf {
    let out = image.with_extension("reference");
    qemu_img(&["convert", "-f", format, "-O", "raw", text(image), text(&out)]);
    out
}

/// Offset of the first byte in which two files differ; the shorter length when one ends early.
#[must_use]
pub fn first_difference(left: &Path, right: &Path) -> Option<u64> {
    let open = |p: &Path| File::open(p).unwrap_or_else(|error| panic!("{}: {error}", p.display()));
    let mut left = BufReader::with_capacity(1 << 20, open(left));
    let mut right = BufReader::with_capacity(1 << 20, open(right));
    let mut offset = 0;
    let (mut a, mut b) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    loop {
        let (n, m) = (fill(&mut left, &mut a), fill(&mut right, &mut b));
        if let Some(at) = differs_at(&a[..n], &b[..m]) {
            return Some(offset + at as u64);
        }
        if n != m {
            return Some(offset + n.min(m) as u64);
        }
        if n == 0 {
            return None;
        }
        offset += n as u64;
    }
}

fn fill(file: &mut impl Read, buffer: &mut [u8]) -> usize {
    let mut done = 0;
    while done < buffer.len() {
        let n = file.read(&mut buffer[done..]).expect("a readable file");
        if n == 0 {
            break;
        }
        done += n;
    }
    done
}

/// Panics, with the offset, unless both files hold the same bytes.
pub fn assert_same(left: &Path, right: &Path, what: &str) {
    let difference = first_difference(left, right);
    assert_eq!(difference, None, "{what}: {} and {} differ", left.display(), right.display());
}

/// Reads a piece of a file.
#[must_use]
pub fn piece(path: &Path, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    let file = File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    file.read_exact_at(&mut out, offset)
        .unwrap_or_else(|e| panic!("{} at {offset}: {e}", path.display()));
    out
}

/// Bytes that the file takes on its file system.
#[must_use]
pub fn allocated(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).expect("a file").blocks() * 512
}

/// `qemu-img check` finds nothing wrong.
pub fn assert_clean(image: &Path) {
    ok_words(&["qemu-img", "check", "-q", "-f", "qcow2", text(image)]);
}
