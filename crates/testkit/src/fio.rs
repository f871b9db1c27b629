//! fio as a client that writes, reads back and compares.
//!
//! Promises: what fio reads back and finds wrong fails the test. It panics where fio is missing.

use std::path::Path;

use serde_json::Value;

use crate::mount::text;
use crate::process::{command, run};

/// One run of fio with `verify`. Sizes in KiB.
#[derive(Clone, Copy, Debug)]
pub struct Verify<'a> {
    /// `libaio`, `io_uring`, `psync` or `mmap`.
    pub engine: &'a str,
    /// `O_DIRECT` or the page cache.
    pub direct: bool,
    /// Clients, each in a part of its own.
    pub jobs: u32,
    /// Requests in flight of each client.
    pub depth: u32,
    /// Range of block sizes, such as `4k-64k`.
    pub blocks: &'a str,
    /// KiB that each client writes and verifies.
    pub size_kib: u32,
}

/// What fio said of the bytes that it read back, in a run that may have ended in any way (the disk
/// was taken from it).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// It read something back.
    pub has_read: bool,
    /// A block was not what it had written.
    pub is_wrong: bool,
}

/// The verdict in fio's usual output.
#[must_use]
pub fn verdict(output: &str) -> Verdict {
    // A block with a header that is not fio's, one with another sum, and the error that either ends
    // a job with (EILSEQ).
    let wrong = ["verify: bad ", "verify failed at", "err=84"];
    // Reads of each job; the summary of a job that ended with an error does not count those that
    // verified.
    let reads = output.split("issued rwts: total=").skip(1);
    Verdict {
        has_read: reads.into_iter().any(|rest| !rest.starts_with("0,")),
        is_wrong: wrong.iter().any(|words| output.contains(words)),
    }
}

impl Default for Verify<'_> {
    fn default() -> Self {
        Self {
            engine: "libaio",
            direct: true,
            jobs: 1,
            depth: 16,
            blocks: "4k-64k",
            size_kib: 8 << 10,
        }
    }
}

impl Verify<'_> {
    /// Runs it on `file` and panics, with fio's words, on any error or wrong byte. Returns (I/Os
    /// written, I/Os read).
    pub fn run(&self, file: &Path) -> (u64, u64) {
        let (size, jobs, depth) = (self.size_kib, self.jobs, self.depth);
        let words = [
            "--name=verify".to_owned(),
            format!("--filename={}", text(file)),
            format!("--ioengine={}", self.engine),
            format!("--direct={}", u8::from(self.direct)),
            format!("--numjobs={jobs}"),
            format!("--iodepth={depth}"),
            format!("--bsrange={}", self.blocks),
            "--blockalign=4k".to_owned(),
            format!("--size={size}k"),
            format!("--offset_increment={size}k"),
            "--rw=randwrite".to_owned(),
            "--verify=crc32c".to_owned(),
            "--verify_fatal=1".to_owned(),
            "--do_verify=1".to_owned(),
            "--verify_state_save=0".to_owned(),
            // Of two writes in flight to the same place either may come last.
            "--serialize_overlap=1".to_owned(),
            "--end_fsync=1".to_owned(),
            "--thread".to_owned(),
            "--group_reporting".to_owned(),
            "--allow_file_create=0".to_owned(),
            "--output-format=json".to_owned(),
        ];
        let finished = run(command(&["fio"]).args(&words));
        assert!(finished.status.success(), "{self:?}: {}", finished.output());
        let start = finished.stdout.find('{').unwrap_or(0);
        let result: Value = serde_json::from_str(&finished.stdout[start..])
            .unwrap_or_else(|error| panic!("{self:?}: {error}: {}", finished.output()));
        let job = &result["jobs"][0];
        assert_eq!(job["error"], 0, "{self:?}: {}", finished.output());
        let count = |kind: &str| job[kind]["total_ios"].as_u64().unwrap_or(0);
        (count("write"), count("read"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::needs;
    use crate::process::has;

    /// fio reads a file of 64 KiB with blocks that it had written, of which `spoil` changed some.
    fn reads_back(spoil: impl Fn(&mut [u8])) -> Verdict {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("file");
        let name = format!("--filename={}", text(&file));
        let words = ["fio", "--name=v", &name, "--bs=4k", "--size=64k", "--verify=crc32c"];
        let more = ["--verify_state_save=0", "--verify_fatal=1"];
        let written = run(command(&[&words[..], &more, &["--rw=write", "--do_verify=0"]].concat()));
        assert_eq!(written.code(), Some(0), "{}", written.output());
        let mut bytes = std::fs::read(&file).expect("the file");
        spoil(&mut bytes);
        std::fs::write(&file, bytes).expect("the file");
        verdict(&run(command(&[&words[..], &more, &["--rw=read"]].concat())).output())
    }

    #[test]
    fn a_wrong_byte_and_a_missing_block_are_in_what_fio_says() {
        if !needs("fio", has("fio")) {
            return;
        }
        let good = Verdict { has_read: true, is_wrong: false };
        assert_eq!(reads_back(|_| ()), good);
        assert!(reads_back(|bytes| bytes[20_000] ^= 1).is_wrong);
        assert!(reads_back(|bytes| bytes[8192..12288].fill(0)).is_wrong);
    }
}
