//! The words of `ringdisk serve --nbd` as the library takes them.
//!
//! Promises: plain copies; nothing can fail, and nothing is opened.

use ringdisk_server::nbd::request::{AccessRequest, DiskRequest, Request};

use super::{NbdAccessArgs, ServeArgs};
use crate::cli::disk_args::{NbdDiskArgs, ServedDisk};

impl From<&ServeArgs> for Request {
    fn from(args: &ServeArgs) -> Request {
        let (nbd, socket) = (&args.nbd, args.socket());
        Request {
            addresses: nbd.nbd.clone(),
            socket_mode: socket.socket_mode,
            socket_group: socket.socket_group.clone(),
            access: (&nbd.access).into(),
            threads: args.device().threads.options(),
            max_connections: nbd.max_connections,
            handshake_limit: nbd.handshake_limit.0,
            idle_exit: nbd.idle_exit,
            share_rw: nbd.share_rw,
            upgrade: args.upgrade,
            keep: args.keep,
            is_quiet: nbd.is_quiet,
            is_for_a_device: nbd.is_for_a_device,
            keeps_output: nbd.keeps_output,
            daemonize: args.daemonize,
            pidfile: args.pidfile.clone(),
            metrics: args.log.metrics.clone(),
            sandbox: args.sandbox.word,
            stats: args.stats,
        }
    }
}

impl From<&NbdAccessArgs> for AccessRequest {
    fn from(args: &NbdAccessArgs) -> AccessRequest {
        AccessRequest {
            tls: args.tls_creds.clone(),
            is_tls_optional: args.tls_is_optional == Some(true),
            verify: args.tls_verify_peer.unwrap_or_default(),
            names: args.tls_allow.clone(),
            rules: args.rules.clone(),
            users: args.allow_user.clone(),
            groups: args.allow_group.clone(),
        }
    }
}

impl From<&ServedDisk> for DiskRequest {
    fn from(disk: &ServedDisk) -> DiskRequest {
        let words: &NbdDiskArgs = &disk.args.nbd;
        DiskRequest {
            image: disk.image.clone(),
            source: (&disk.args.source).into(),
            name: words.export_name.clone().unwrap_or_default(),
            description: words.description.clone().unwrap_or_default(),
            bitmaps: words.bitmap.clone(),
            allocation_depth: words.allocation_depth,
            shows_recording: words.shows_recording,
        }
    }
}
