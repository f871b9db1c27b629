//! fio as a client that writes, reads back and compares.

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
    /// Runs it on `file` and panics, with fio's words, on any error or wrong byte. Returns (I/Os written, I/Os read).
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
