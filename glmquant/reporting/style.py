"""The page's style sheet: light and dark, narrow and wide, and on paper. No font or image is fetched."""

CSS = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b2430;--soft:#5b6675;--line:#dfe3e8;--accent:#1858c4;
--extra:#c2570c;--good:#18794e;--warn:#9a6700;--bad:#c62a2f;--tint:#e8f0fe}
@media(prefers-color-scheme:dark){:root{--bg:#0f141a;--card:#171e26;--ink:#e4e9ef;--soft:#9aa7b5;--line:#2c3641;
--accent:#6ea8fe;--extra:#f0a35e;--good:#4cc38a;--warn:#e0b341;--bad:#ff8589;--tint:#1d2b40}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",
"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:1.75rem;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:0 0 8px}
.over{margin:0 0 4px;font-size:.8rem;color:var(--soft)}
.sub{margin:6px 0 0;color:var(--soft);overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin-top:16px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,165px),1fr));gap:12px;margin:20px 0 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px}
.tile dt{font-size:.8rem;color:var(--soft)}
.tile dd{margin:0}
.tile b{display:block;font-size:1.45rem;line-height:1.3;font-weight:650}
.tile span{font-size:.82rem;color:var(--soft)}
.tile.bad{font-weight:400}.tile.good b{color:var(--good)}.tile.bad b{color:var(--bad)}
.note{color:var(--soft);font-size:.88rem;margin:6px 0 10px;max-width:78ch}
.scroll{overflow-x:auto;margin:8px 0}
.scroll:focus-visible,summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.86rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:top}
th{font-weight:600;color:var(--soft)}
.l{text-align:left}
th:first-child,td:first-child{padding-left:0}th:last-child,td:last-child{padding-right:0}
tbody tr:last-child td{border-bottom:0}
.tile code{white-space:nowrap}
#worst td.l{white-space:normal;overflow-wrap:anywhere;min-width:240px}
code{font:.92em/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
.tag{border:1px solid var(--line);border-radius:5px;padding:0 6px;font-size:.8rem}
.tag.packed{background:var(--tint);border-color:transparent;color:var(--accent);font-weight:600}
.meter{display:inline-block;width:90px;height:8px;border-radius:4px;background:var(--line);margin-right:8px;
overflow:hidden;text-align:left;vertical-align:1px}
.meter i{display:block;height:100%;background:var(--accent)}
.good{color:var(--good)}.warn{color:var(--warn);font-weight:600}.bad{color:var(--bad);font-weight:600}
.none{color:var(--soft)}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr));gap:16px 20px;margin-top:8px}
figure{margin:0;min-width:0}
figcaption{font-size:.86rem;font-weight:600;margin-bottom:2px}
svg{display:block;width:100%;max-width:460px;height:auto}
svg text{font-size:10.5px;fill:var(--soft);font-variant-numeric:tabular-nums}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}
.mark line{stroke:var(--accent);stroke-width:2.2;stroke-linecap:round;opacity:.45}
.mark circle{fill:var(--accent)}
.mark.mtp line{stroke:var(--extra)}.mark.mtp circle{fill:var(--extra)}
.bar{fill:var(--accent)}
details{margin-top:8px}
summary{cursor:pointer;color:var(--accent);font-size:.88rem;padding:4px 0}
.findings{list-style:none;margin:0;padding:0}
.finding{border-left:3px solid var(--soft);padding:2px 0 2px 12px;margin:10px 0;overflow-wrap:anywhere}
.finding p{margin:2px 0}.finding ul{margin:2px 0;padding-left:18px;font-size:.88rem}
.finding.error{border-color:var(--bad)}.finding.error b{color:var(--bad)}
.finding.warning{border-color:var(--warn)}.finding.warning b{color:var(--warn)}
#kernels td:last-child{white-space:normal;min-width:160px}
.names{color:var(--soft);font-size:.86rem;overflow-wrap:anywhere}
@media(max-width:560px){main{padding:18px 10px 32px}section{padding:14px 12px}h1{font-size:1.4rem}
#worst td.l{min-width:200px}}
@media print{body{background:#fff}section,.tile{break-inside:avoid-page}.scroll{overflow:visible}}
"""
